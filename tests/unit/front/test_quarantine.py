"""Which requests may run beside others after engines have died with them."""

from __future__ import annotations

import pytest

from headway.front.quarantine import MAX_TRIALS, MOST_RUNNING, SUSPECT_DEATHS, Quarantine

MANY = [f"r{number}" for number in range(100)]


@pytest.fixture
def quarantine() -> Quarantine:
    return Quarantine()


def after_deaths(quarantine: Quarantine, names: list[str], number: int = SUSPECT_DEATHS) -> None:
    for _ in range(number):
        quarantine.note_death(names)


def admitted(quarantine: Quarantine, names: list[str]) -> list[str]:
    return [name for name in names if quarantine.admits(name)]


def test_who_has_seen_one_death_is_no_suspect(quarantine: Quarantine) -> None:
    quarantine.note_death(MANY)
    assert admitted(quarantine, MANY) == MANY


def test_few_suspects_run_at_a_time_and_each_that_gets_a_token_makes_room_for_others(quarantine: Quarantine) -> None:
    after_deaths(quarantine, MANY)
    assert admitted(quarantine, ["another", *MANY]) == ["another", *MANY[:MOST_RUNNING]]
    assert admitted(quarantine, MANY[:2]) == MANY[:2], "they have their place"
    assert quarantine.release("r0") and "r0" not in quarantine.suspicions
    assert not quarantine.release("r99"), "it did not run"
    assert not quarantine.release("another")
    assert admitted(quarantine, MANY[1:99]) == MANY[1 : MOST_RUNNING + 1]


def test_half_as_many_after_each_death_until_one_is_alone(quarantine: Quarantine) -> None:
    after_deaths(quarantine, MANY)
    sizes = []
    while (running := admitted(quarantine, MANY)) and len(sizes) < 10:
        sizes.append(len(running))
        quarantine.note_death(running)
        if quarantine.is_guilty(running[0]):
            break
    assert sizes == [16, 8, 4, 2, *[1] * MAX_TRIALS]
    assert [name for name in MANY if quarantine.is_guilty(name)] == running
    assert not quarantine.release(running[0])
    assert admitted(quarantine, MANY[1:]) == ["r1"], "still one at a time"
    assert quarantine.release("r1") and len(admitted(quarantine, MANY[2:])) == 2, "and one more with each token"


def test_a_death_without_suspects_says_nothing_of_their_number(quarantine: Quarantine) -> None:
    after_deaths(quarantine, MANY)
    quarantine.note_death(["innocent"])
    assert len(admitted(quarantine, MANY)) == MOST_RUNNING


def test_a_token_clears_of_all_suspicion(quarantine: Quarantine) -> None:
    for _ in range(5 * MAX_TRIALS):
        after_deaths(quarantine, ["r"], SUSPECT_DEATHS - 1)
        quarantine.release("r")
    assert not quarantine.is_guilty("r") and not quarantine.suspicions
