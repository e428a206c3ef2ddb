"""Cards, links and machines: figures with their sources, and what people write for them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.devices.figures.presets import (
    CARDS,
    LINKS,
    Card,
    Link,
    MachineSpec,
    default_host_link,
    format_machine,
    kernel_ns,
    parse_machine,
)


@pytest.mark.parametrize(
    ("text", "cards", "host", "peer"),
    [
        ("v100", ["v100"], "pcie3", None),
        ("8 x v100, nvlink2", ["v100"] * 8, "pcie3", "nvlink2"),
        ("4xa100, nvlink3, pcie4", ["a100"] * 4, "pcie4", "nvlink3"),
        ("pcie3,nvlink3,4xa100", ["a100"] * 4, "pcie3", "nvlink3"),
        ("2 x v100, 2 x a100, pcie3", ["v100", "v100", "a100", "a100"], "pcie3", None),
        ("a100, v100, a100", ["a100", "v100", "a100"], "pcie3", None),
        ("  2 X  H100 ,NVLink4 ", ["h100"] * 2, "pcie5", "nvlink4"),
        ("2 x cpu", ["cpu"] * 2, "pcie4", None),
        ("64 x k40, ethernet10", ["k40"] * 64, "pcie3", "ethernet10"),
    ],
)
def test_parse(text: str, cards: list[str], host: str, peer: str | None) -> None:
    machine = parse_machine(text)
    assert [card.name for card in machine.cards] == cards
    assert machine.host_link == LINKS[host]
    assert machine.peer_link == (None if peer is None else LINKS[peer])


@pytest.mark.parametrize("network", ["ethernet10", "ethernet100", "infiniband"])
def test_messages_cross_a_network_in_its_latency(network: str) -> None:
    assert parse_machine(f"2 x k40, {network}").message_s == LINKS[network].latency_s > 0


@pytest.mark.parametrize("text", ["2 x v100", "2 x v100, nvlink2", "2 x v100, pcie4"])
def test_messages_on_one_host_take_no_time(text: str) -> None:
    assert parse_machine(text).message_s == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v10O", "unknown card or link 'v10O' in 'v10O', did you mean 'v100'?; cards are k40, p100, v100, a100, h100"),
        ("8 x v100, nvlink9", "unknown card or link 'nvlink9' in '8 x v100, nvlink9', did you mean 'nvlink4' or"),
        ("tpu", "unknown card or link 'tpu' in 'tpu'"),
        ("zzzzzz", "unknown card or link 'zzzzzz' in 'zzzzzz'; cards are"),
        ("", "'' in '' is neither a card nor a link; write such as '8 x v100, nvlink2'"),
        ("v100,", "'' in 'v100,' is neither a card nor a link"),
        ("8 v100", "'8 v100' in '8 v100' is neither a card nor a link"),
        ("-1 x v100", "'-1 x v100' in '-1 x v100' is neither"),
        ("0 x v100", "'0 x v100' in '0 x v100' is no card at all; a count is at least 1"),
        ("nvlink2", "'nvlink2' names no card; write such as '8 x v100, nvlink2'; cards are"),
        ("v100, 2 x nvlink2", "'2 x nvlink2' in 'v100, 2 x nvlink2' counts a link; a link joins all cards"),
        ("v100, pcie3, pcie4", "pcie3 and pcie4 in 'v100, pcie3, pcie4' both join the cards to their host; name one"),
        ("v100, nvlink2, ethernet10", "nvlink2 and ethernet10 in 'v100, nvlink2, ethernet10' both join the cards to"),
    ],
)
def test_parse_errors_name_the_fault(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_machine(text)


@pytest.mark.parametrize(
    ("text", "formatted"),
    [
        ("8xv100,nvlink2", "8 x v100, nvlink2"),
        ("1 x a100, pcie4", "a100"),
        ("2 x v100, 2 x a100, pcie4, nvlink2", "2 x v100, 2 x a100, nvlink2, pcie4"),
        ("a100, v100, a100, a100", "a100, v100, 2 x a100"),
    ],
)
def test_format(text: str, formatted: str) -> None:
    assert format_machine(parse_machine(text)) == formatted


@given(
    st.lists(st.sampled_from(sorted(CARDS)), min_size=1, max_size=12),
    st.sampled_from([None, "pcie3", "pcie4", "pcie5"]),
    st.sampled_from([None, *(name for name in LINKS if not name.startswith("pcie"))]),
)
def test_format_and_parse_are_inverse(cards: list[str], host: str | None, peer: str | None) -> None:
    machine = parse_machine(", ".join([*cards, *(link for link in (host, peer) if link is not None)]))
    assert parse_machine(format_machine(machine)) == machine


def test_default_host_link_of_a_card_of_ones_own() -> None:
    mine = replace(CARDS["h100"], name="mine")
    assert default_host_link([mine]) == LINKS["pcie5"]
    assert default_host_link([mine, CARDS["k40"]]) == LINKS["pcie3"]


def test_every_figure_has_its_source() -> None:
    for card in CARDS.values():
        assert "TFLOPS" in card.source and "GB/s" in card.source, card
    for link in LINKS.values():
        assert "GB/s" in link.source, link


def test_names_are_the_keys() -> None:
    assert all(name == card.name for name, card in CARDS.items())
    assert all(name == link.name for name, link in LINKS.items())
    assert not CARDS.keys() & LINKS.keys()


def test_achieved_rates_lie_below_the_datasheet() -> None:
    peaks = {"k40": 4.29e12, "p100": 10.6e12, "v100": 15.7e12, "a100": 19.5e12, "h100": 67e12, "h200": 67e12}
    for name, peak in peaks.items():
        assert 0.7 * peak <= CARDS[name].flops_per_s < peak
    assert CARDS["v100"].flops_per_s == pytest.approx(13.345e12)
    assert CARDS["v100"].bytes_per_s == pytest.approx(765e9)
    assert CARDS["cpu"].flops_per_s == pytest.approx(3.917e12, rel=1e-3)
    assert LINKS["pcie3"].bytes_per_s == pytest.approx(12.6e9)
    assert LINKS["nvlink2"].bytes_per_s == pytest.approx(45e9)


def test_later_generations_are_faster() -> None:
    for names in (("k40", "p100", "v100", "a100", "h100"), ("pcie3", "pcie4", "pcie5"), ("nvlink1", "nvlink2")):
        rates = [(CARDS.get(name) or LINKS[name]).bytes_per_s for name in names]
        assert rates == sorted(rates)


CARD = Card("mine", 1e12, 1e11, 2**30, 2e-6, 2)


@pytest.mark.parametrize(
    ("flops", "nbytes", "itemsize", "expected"),
    [
        (0, 0, 4, 2_000),  # nothing takes less than the shortest kernel
        (1e9, 1e6, 4, 1_000_000),  # arithmetic: 1e9 / 1e12 s
        (1e9, 1e6, 8, 2_000_000),  # at half the rate
        (1e9, 1e6, 2, 1_000_000),  # no tensor cores
        (1e6, 1e9, 4, 10_000_000),  # memory: 1e9 / 1e11 s
        (1e6, 1e9, 8, 10_000_000),
    ],
)
def test_kernel_time(flops: float, nbytes: float, itemsize: int, expected: int) -> None:
    assert kernel_ns(CARD, flops, nbytes, itemsize) == expected


def test_machines_of_ones_own() -> None:
    machine = MachineSpec((CARD,), Link("wire", 1e9, 1e-6))
    assert (machine.peer_link, machine.message_s) == (None, 0.0)
    assert format_machine(machine) == "mine, wire"
