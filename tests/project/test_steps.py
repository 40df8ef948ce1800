"""The steps that tests act before, behind or in place of are in the product."""

from harness.steps import LIMITS, STEPS


def test_every_step_and_limit_that_tests_name_is_there() -> None:
    named = {**STEPS, **LIMITS}
    assert [name for name, (owner, attribute) in named.items() if not hasattr(owner, attribute)] == []
