"""A session whose header changes every turn, served by four policies: the two-minute demonstration."""

from ml_collections import ConfigDict

from experiments.configs import replay


def get_config() -> ConfigDict:
    """The replay of one generated session of six turns."""
    config = replay.get_config()
    config.update(
        study="demo",
        scenario="agent_meta",
        turns=6,
        prompt_tokens=4000,  # the last turn and its response fit into a context of 4096
        policy="full,prefix,naive,irminsul",
        plan_only="prefix",  # it misses nearly everything here, so computing it would only repeat full prefill
        model="irminsul-mini-mla",
        mode="deterministic",  # one block size for every policy, so that a ratio of times is a ratio of work
        pages=320,
        live_table=True,
        resume=False,
    )
    return config
