"""The tables of supported models in README.md and docs/models.md, from `model_configs`. Run this file to print them."""

from collections.abc import Iterable, Sequence

from model_configs import ENGINES, MODELS, Model


def table(*rows: Sequence[str]) -> str:
    """A table of Markdown. The first row has the names of the columns."""
    names, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([names, "|---" * len(rows[0]) + "|", *others])


def support(models: Iterable[Model], engine: str) -> str:
    """Whether kvfold packs these models in an engine: yes, no, partly. A dash if the engine has none of them."""
    there = [model for model in models if engine in model.engines]
    refused = [bool(model.refused or engine in model.refused_by) for model in there]
    if not there:
        return "–"
    return "no" if all(refused) else "partly" if any(refused) else "yes"


def families() -> str:
    """One row per family that some engine packs."""
    rows = []
    for family in dict.fromkeys(model.family for model in MODELS.values()):
        models = [model for model in MODELS.values() if model.family == family]
        engines = [support(models, engine) for engine in ENGINES]
        if set(engines) - {"no", "–"}:
            rows.append([family, *engines])
    return table(["models", *ENGINES], *rows)


def packed() -> str:
    """One row per model that can be packed and that an engine has."""
    rows = []
    for name, model in MODELS.items():
        if model.refused or not model.engines:
            continue
        counts = {kind: len(getattr(model, kind)) for kind in ("sliding", "chunked", "linear", "shared")}
        layers = len(model.packed) + sum(counts.values())
        others = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        also = [word for word, there in (("sinks", model.sink), (f"soft-cap {model.cap}", model.cap)) if there]
        dims = f"{model.key_dim}" if model.key_dim == model.value_dim else f"{model.key_dim}, {model.value_dim}"
        rows.append(
            [
                name,
                f"{len(model.packed)} of {layers}",
                others or "none",
                f"{model.q_heads}, {model.kv_heads}",
                ", ".join([dims, *also]),
                *(support([model], engine) for engine in ENGINES),
            ]
        )
    return table(["model", "packed layers", "other layers", "heads", "dimensions", *ENGINES], *rows)


def refused() -> str:
    """One row per reason."""
    reasons: dict[str, list[str]] = {}
    for name, model in MODELS.items():
        if model.refused:
            reasons.setdefault(model.refused, []).append(name)
        for engine, reason in model.refused_by.items():
            reasons.setdefault(f"{engine}: {reason}", []).append(name)
    return table(["models", "refused because"], *([", ".join(names), reason] for reason, names in reasons.items()))


if __name__ == "__main__":
    print(families(), packed(), refused(), sep="\n\n")
