"""The page of models says what the code does."""

from tests.tolerances import PARITY
from tools.models_page import PAGE, errors_on, rendered, table, undocumented


def test_the_page_fits_the_code():
    page = PAGE.read_text()
    assert rendered(page, errors_on(page)) == page, "run python -m tools.models_page"
    assert not undocumented()


def test_the_page_states_an_error_wherever_there_is_a_fixture():
    stated = errors_on(PAGE.read_text())
    measured = {name for name, pair in stated.items() if "none" not in pair}
    assert {"deepseek_v32", "glm_moe_dsa", "longcat_flash", "kimi_linear", "kimi_k2", "mistral_large_3"} <= measured
    assert stated["jamba"] == ("none", "none")
    assert max(float(stated[name][1]) for name in measured) <= PARITY["atol"]
    assert errors_on(table(stated)) == stated  # what is read is what was written
