"""Links between devices and between nodes by name, for what a catalogue row assumes otherwise."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Literal

import msgspec

from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import Accelerator


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link between the devices of a node, or between nodes: GB/s per device, one direction."""

    name: str
    between: Literal["devices", "nodes"]
    gb_s: float
    source: str
    as_of: str


@lru_cache(maxsize=1)
def load_links() -> Mapping[str, Link]:
    """The known links by name."""
    text = files("ridgeline.hardware").joinpath("links.toml").read_text(encoding="utf-8")
    return {row.name: row for row in msgspec.convert(tomllib.loads(text)["link"], list[Link])}


def with_links(
    catalogue: Mapping[str, Accelerator], interconnect: str | None, network: str | None
) -> dict[str, Accelerator]:
    """The catalogue with these links, between the devices of a node and between nodes.

    None: as the rows have them. Raises BadInput for an unknown name.
    """
    changes = {}
    if interconnect is not None:
        changes["link_bytes_s"] = _rate(interconnect, "devices", "--interconnect")
    if network is not None:
        changes["network_bytes_s"] = _rate(network, "nodes", "--network")
    if not changes:
        return dict(catalogue)
    return {name: msgspec.structs.replace(row, **changes) for name, row in catalogue.items()}


def _rate(name: str, between: str, option: str) -> float:
    known = {link.name: link for link in load_links().values() if link.between == between}
    if name.lower() not in known:
        raise BadInput(
            f"{option} needs the name of a link between {between}",
            value=name,
            limit=", ".join(known),
            fix="give another rate in a catalogue file: --catalogue FILE",
        )
    return known[name.lower()].gb_s * 1e9
