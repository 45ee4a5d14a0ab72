"""What does a listing say of every scheme of the catalogue?"""

from collections.abc import Mapping
from typing import Any

import jax

from resjax.models.lm import LM, Shape
from resjax.residual import Init, InitRule, NormDefaults, OptRule, Scheme
from resjax.residual.entries import FAMILIES, FORMS
from resjax.residual.gains import named, show

DEPTH, WIDTH = 12, 64  # of the model whose parameters are counted
SHAPE = Shape(vocab=256, length=128, depth=DEPTH, width=WIDTH, heads=4, norms=NormDefaults())


def rows() -> list[dict[str, Any]]:
    """One row an entry and form, in the catalogue's order: strings, ready to be shown."""
    base = count(FAMILIES["where the norms stand"][1])
    found = []
    for family, entries in FAMILIES.items():
        for scheme in entries:
            forms = FORMS.get(scheme.name, {"": scheme})
            found += [row(form, made, family, base) for form, made in forms.items()]
    return found


def row(form: str, scheme: Scheme, family: str, base: int) -> dict[str, Any]:
    more = count(scheme) - base
    return {
        "name": scheme.name,
        "form": form,
        "family": family,
        "equation": scheme.equation,
        "carries": scheme.carried,
        "final_norm": scheme.final_norm,
        "parameters": f"{more:+,} parameters" if more else "no more parameters",
        "init": "; ".join(f"{roles}: {text}" for text, roles in grouped(scheme.init, started).items()),
        "optim": "; ".join(
            [f"{roles}: {text}" for text, roles in grouped(scheme.optim, treated).items()]
            + [
                f"{roles}: norm 1 along '{axis}' after each step"
                for axis, roles in grouped(scheme.project, str).items()
            ]
            + (["skip gains set from one batch before training"] if scheme.calibrate else [])
        ),
        "paper": scheme.paper,
        "unverified": scheme.unverified,
    }


def grouped(rules: Mapping[str, Any], say: Any) -> dict[str, str]:
    """The roles of equal rules together: sentence -> roles."""
    found: dict[str, list[str]] = {}
    for role, rule in rules.items():
        found.setdefault(say(rule), []).append(role)
    return {text: ", ".join(roles) for text, roles in found.items()}


def started(rule: InitRule) -> str:
    family = {
        "base": "as the run's own",
        "unscaled": "as the run's own, without its factor on output matrices",
        "fan_in": "1/sqrt(fan in)",
        "xavier": "Xavier",
        "identity": "the identity",
    }[rule.family]
    if rule.gain == 0.0:
        return "0"
    gain = named(rule.gain) if callable(rule.gain) else f"{rule.gain:g}"
    return family if gain == "1" else f"{gain} x {family}"


def treated(rule: OptRule) -> str:
    parts = []
    for name, factor in (("rate", rule.lr), ("eps", rule.eps)):
        if factor != 1.0:
            parts.append(f"{name} x {show(factor)}")
    if rule.decay is not None:
        parts.append("decays" if rule.decay else "no decay")
    if rule.clip is not None:
        parts.append(f"gradient clipped at {rule.clip:g}")
    return ", ".join(parts)


def count(scheme: Scheme) -> int:
    """Parameters of the model under a scheme."""
    model = jax.eval_shape(lambda: LM(SHAPE, scheme, Init(), key=jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(model))
