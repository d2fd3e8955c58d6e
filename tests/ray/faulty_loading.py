"""The default way to load, with an engine that fails in the step that finds a certain file, and takes it away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.commands.options import ModelOptions
from slipstream.commands.serve import Loading
from slipstream.engine.contract import StepPlan
from slipstream.runners.host.runner import HostRunner
from slipstream.server.service.model_holder import LoadedModel


@dataclass(frozen=True)
class FaultyLoading:
    options: ModelOptions
    fault: Path

    def __call__(self, on_death: Callable[[Exception], None]) -> LoadedModel:
        submit, fault = HostRunner.submit, self.fault

        def failing(runner: HostRunner, plan: StepPlan) -> None:
            try:
                fault.unlink()
            except FileNotFoundError:
                return submit(runner, plan)
            raise RuntimeError("injected: a lost device")

        HostRunner.submit = failing  # type: ignore[method-assign]
        return Loading(self.options)(on_death)
