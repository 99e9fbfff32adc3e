"""Shorthand of profile files: a model of eighty equal blocks, and a cluster of hundreds of equal GPUs, said once.

``count = 32`` in a ``[[model.layers]]`` table: so many equal layers follow each other. ``like = 4`` in a ``[[devices]]`` table:
whatever it does not say itself is as that rank, an earlier one, says. Files are written so where it says the same.
"""

from __future__ import annotations

from typing import Any

from hetero_mpi.planning.types.codec import raise_all

MOST_ITEMS = 10_000
_OWN_KEYS = ("rank", "host")


def shortened(data: dict[str, Any]) -> dict[str, Any]:
    """The same profile in shorthand. ``data`` stays as it is."""
    model = {**data["model"], "layers": _counted(data["model"]["layers"])}
    return {**data, "model": model, "devices": _alike(data["devices"])}


def _counted(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[tuple[dict[str, Any], int]] = []
    for layer in layers:
        if found and found[-1][0] == layer:
            found[-1] = layer, found[-1][1] + 1
        else:
            found.append((layer, 1))
    return [layer if count == 1 else {"kind": layer["kind"], "count": count, **layer} for layer, count in found]


def _alike(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first: dict[str, int] = {}
    found = []
    for device in devices:
        content = repr({key: value for key, value in device.items() if key not in _OWN_KEYS})
        earlier = first.setdefault(content, device["rank"])
        own = {key: device[key] for key in _OWN_KEYS}
        found.append(device if earlier == device["rank"] else {**own, "like": earlier})
    return found


def expanded(data: Any, where: str) -> Any:
    """Without shorthand; whatever is not a profile is left to those who read it. Raises ``UserError`` with all problems."""
    problems: list[str] = []
    if not isinstance(data, dict):
        return data
    data, model = dict(data), data.get("model")
    if isinstance(model, dict) and isinstance(model.get("layers"), list):
        data["model"] = {**model, "layers": _repeated(model["layers"], problems)}
    if isinstance(data.get("devices"), list):
        data["devices"] = _filled(data["devices"], problems)
    raise_all(where, problems)
    return data


def _repeated(layers: list[Any], problems: list[str]) -> list[Any]:
    found: list[Any] = []
    for place, layer in enumerate(layers):
        count = layer.get("count", 1) if isinstance(layer, dict) else 1
        if type(count) is not int or not 1 <= count <= MOST_ITEMS:
            problems.append(f"model.layers[{place}].count = {count!r}: must be a whole number from 1 to {MOST_ITEMS:,}")
        elif isinstance(layer, dict):
            found += [{key: value for key, value in layer.items() if key != "count"}] * count
        else:
            found.append(layer)
    return found


def _filled(devices: list[Any], problems: list[str]) -> list[Any]:
    found: list[Any] = []
    for place, device in enumerate(devices):
        if isinstance(device, dict) and "like" in device:
            like = device["like"]
            if type(like) is not int or not 0 <= like < place or not isinstance(found[like], dict):
                problems.append(f"devices[{place}].like = {like!r}: must be the rank of an earlier device")
                like = None
            earlier = {} if like is None else found[like]
            device = {**earlier, **{key: value for key, value in device.items() if key != "like"}}
        found.append(device)
    return found
