"""`make demo`: start everything, train two tenants' adapters, and ask them, step by step."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import openai

from demo import ask, release, seed, training
from demo.client import ManagementClient
from demo.commands import Commands
from demo.data import score
from demo.errors import StepFailed
from demo.platform import Platform, environment, mail_folder
from demo.processes import (
    ChildProcess,
    Command,
    log_tail,
    recorded_process,
    stop_leftover,
    write_pid_file,
)
from demo.screen import Screen
from demo.seed import ROOT
from demo.stack import EmbeddedStack, stop_stack
from demo.state import DemoState, TenantState, write_private
from demo.supervisor import Supervisor
from worker.base_model import MANIFEST, PACKAGED_MODEL

_T = TypeVar("_T")

BASE_MODELS = ROOT / ".cache" / "base"


class Demo:
    """One run of the demo in `folder`; `up` returns when it is ready, `watch` never does."""

    def __init__(self, folder: Path, screen: Screen) -> None:
        self.folder = folder
        self.screen = screen
        self.ready_file = folder / "ready.json"
        self.base_model_dir = BASE_MODELS / PACKAGED_MODEL
        self._state_file = folder / "state.json"
        self._pid_file = folder / "run" / "demo.json"
        self._supervisor = Supervisor(report=lambda line: screen.print(f"! {line}"))
        self._stopping = contextlib.ExitStack()
        self._metrics_ports: dict[str, int] = {}
        self._is_ours = False  # whether this run owns the folder and stops what runs in it

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_ours:
            return
        # A second Ctrl-C must not leave processes running.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        with self.screen.step("Stopped everything"):
            self._stopping.close()

    def up(self) -> None:
        """Do all steps from starting servers to the first answers. Raises StepFailed."""
        started = time.monotonic()
        self._claim_folder()
        state = DemoState.load(self._state_file)
        converting = self._begin_conversion()  # beside all that does not read the model
        with self.screen.step("PostgreSQL, Redis and SeaweedFS run"):
            stack = EmbeddedStack(self.folder / "stack")
            self._stopping.callback(stack.stop)
            stack.start()
        env = environment(
            stack.env,
            folder=self.folder,
            base_url=state.base_url,
            base_model_dir=self.base_model_dir,
        )
        env["LORIKEET_TRAIN_BATCH"] = "8"  # both tenants' runs in one batch
        platform = Platform(env, folder=self.folder, port=state.web_port)
        self._metrics_ports = platform.metrics_ports
        with Commands(env) as commands:
            with self.screen.step("Database migrated"):
                seed.migrate(commands)
            self._seed(commands, state)
            self._stopping.callback(self._supervisor.stop)
            for process in platform.processes_without_base:
                self._supervisor.start(process)
            self._wait_for_conversion(converting)
            self._supervisor.start(platform.worker)
            self._schedule(commands, state)
        self._supervisor.start(platform.trainer)  # last, so that it finds both runs
        with self.screen.step("Web, worker, accountant, batch runner and Celery run"):
            platform.wait_until_ready()
        for server in stack.processes:
            self._supervisor.watch(server)
        self._supervisor.run_in_background()
        acme, globex = state.tenants
        self._train(state, globex)  # it is checked and asked while acme's still trains
        self._show_first(state, globex)
        self._train(state, acme)
        sent = self._send_second_version(state)  # it is checked beside the measuring
        self._measure(state)
        self._show(state)
        self._release(state, sent)
        write_private(self.ready_file, state.ready(self._metrics_ports))
        self._greet(state, time.monotonic() - started)

    def watch(self) -> NoReturn:
        """Wait for a signal, while the supervisor keeps everything running."""
        while True:
            signal.pause()

    def _claim_folder(self) -> None:
        """Allow one run at a time; stop the processes that a killed one left."""
        if recorded_process(self._pid_file):
            raise StepFailed(
                "the demo is already running",
                advice=f"use it ({self.ready_file}), or stop it with `make demo-stop`",
            )
        self._is_ours = True
        self.ready_file.unlink(missing_ok=True)
        stop_children(self.folder)
        write_pid_file(self._pid_file, os.getpid(), stop_timeout_s=60.0)
        self._stopping.callback(self._pid_file.unlink, missing_ok=True)
        self._stopping.callback(self.ready_file.unlink, missing_ok=True)

    def _begin_conversion(self) -> ChildProcess | None:
        """Start the conversion of the packaged model; None if it was converted before."""
        if (self.base_model_dir / MANIFEST).exists():
            return None
        converting = ChildProcess(
            "conversion",
            Command(
                argv=[sys.executable, "-m", "worker.base_model", f"--out={BASE_MODELS}"], cwd=ROOT
            ),
            log=self.folder / "logs" / "base_model.log",
            pid_file=self.folder / "run" / "base_model.json",
        )
        self._stopping.callback(converting.stop)
        converting.start()
        return converting

    def _wait_for_conversion(self, converting: ChildProcess | None) -> None:
        if converting is None:
            return
        with self.screen.step(f"Converted {PACKAGED_MODEL} to safetensors"):
            while converting.is_running():
                time.sleep(0.05)
        converting.stop()
        if converting.returncode != 0:
            raise StepFailed(
                "the base model could not be converted",
                details=log_tail(converting.log),
                advice="it needs about 2 GB of free memory and 600 MB of disk",
            )

    def _seed(self, commands: Commands, state: DemoState) -> None:
        if state.is_seeded:
            return
        with self.screen.step("Tenants acme and globex, their owners, keys and datasets made"):
            try:
                seed.seed(commands, state)
                training.upload_rows(commands, state.tenants)
            finally:
                state.save(self._state_file)  # now, because the keys cannot be read again
        state.is_seeded = True
        state.save(self._state_file)

    def _adapter_folder(self, tenant: str) -> Path:
        return self.folder / "trained" / tenant

    def _schedule(self, commands: Commands, state: DemoState) -> None:
        """Have both adapters trained by schedules, which run once now."""
        if state.is_scheduled or all(tenant.digest for tenant in state.tenants):
            return
        with self.screen.step("Base model added; schedules set, and run once now"):
            commands.run("base_model_add", str(self.base_model_dir))
            training.schedule(commands, state.tenants)
        state.is_scheduled = True
        state.save(self._state_file)

    def _train(self, state: DemoState, tenant: TenantState) -> None:
        """Wait until the schedule's run has made a version of a tenant's adapter."""
        if tenant.digest:
            return
        title = f"Trained {tenant.slug}'s “{tenant.adapter}” by its schedule, checked, live"
        with contextlib.closing(ManagementClient(state.base_url, tenant.api_key)) as client:
            with self.screen.bar(title) as report:
                version = training.wait_until_trained(client, tenant, report)
            folder = self._adapter_folder(tenant.slug)
            training.download(client, tenant.adapter, version["number"], folder)
        tenant.digest = version["digest"]
        state.save(self._state_file)

    def _measure(self, state: DemoState) -> None:
        if state.measured is None:
            acme = state.tenants[0]
            with self.screen.bar("Measured acme's adapter on held-out invoices") as report:
                state.measured = _asked(
                    ask.measure(state, acme, base_model=PACKAGED_MODEL, report=report)
                )
            state.save(self._state_file)
            when = ""
        else:
            when = ", measured on the first run"
        measured = state.measured
        self.screen.print(
            f"  right fields on {measured['prompts']} held-out invoices: "
            f"adapter {measured['adapter']:.0%}; "
            f"base {measured['base']:.0%} on {measured['base_prompts']} of them{when}"
        )

    def _show_first(self, state: DemoState, tenant: TenantState) -> None:
        with self.screen.step(f"Asked {tenant.slug}'s adapter"):
            answer = _asked(ask.ask_streamed(state, tenant))
        self._print_answer(answer)

    def _print_answer(self, answer: ask.Answer) -> None:
        self.screen.print()
        self.screen.print(f"  {answer.tenant} · model {answer.model}", style="bold")
        self.screen.print(_indent(answer.prompt), style="dim")
        self.screen.print(_indent(answer.text.strip()))
        self.screen.print(
            f"    first token after {answer.first_token_s:.2f} s, all after {answer.total_s:.2f} s",
            style="dim",
        )

    def _show(self, state: DemoState) -> None:
        with self.screen.step("Asked every adapter at the same time"):
            answers = _asked(ask.ask_everybody(state))
        for answer in answers:
            self._print_answer(answer)
        self.screen.print()
        acme = state.tenants[0]
        with self.screen.step("Asked with a JSON schema; the answer obeys it"):
            invoice = _asked(ask.ask_with_schema(state, acme))
        self.screen.print(_indent(json.dumps(invoice, ensure_ascii=False)))

    def _send_second_version(self, state: DemoState) -> int:
        """Upload a second version of acme's adapter, which will be held back. -> its number"""
        if state.held_version is not None:
            return state.held_version
        acme = state.tenants[0]
        trained = self._adapter_folder(acme.slug)
        folder = release.second_version(trained, trained.with_name("acme-second"))
        with contextlib.closing(ManagementClient(state.base_url, acme.api_key)) as client:
            return client.send_adapter(acme.adapter, folder, base_model=PACKAGED_MODEL)

    def _release(self, state: DemoState, number: int) -> None:
        """Hold a second version back, and try it on a tenth of the callers."""
        acme = state.tenants[0]
        with contextlib.closing(ManagementClient(state.base_url, acme.api_key)) as client:
            if state.held_version is None:
                with self.screen.step("Uploaded a second version of acme's adapter: held back"):
                    client.wait_until_ready(acme.adapter, number)
                state.held_version = number
                state.save(self._state_file)
            with self.screen.step(f"Waited for the doctor's report on version {number}"):
                is_finished = release.wait_for_report(client, acme.adapter, number)
            if not is_finished:
                self.screen.print("  it is not finished: .demo/logs/inspector.log says why")
            release.make_canary(client, acme, number)
        with self.screen.step(f"Asked “{release.ALIAS}” for {release.NUM_CALLERS} callers"):
            told = _asked(release.ask_as_callers(state, acme))
        self.screen.print(release.summary(told, number))

    def _greet(self, state: DemoState, seconds: float) -> None:
        acme = state.tenants[0]
        held = f"{state.base_url}/console/adapters/{acme.adapter}/versions/{state.held_version}"
        lines = [
            "",
            f"Ready after {seconds:.0f} s. Everything is also in {self.ready_file}",
            "",
            f"  Console    {state.ready()['console_url']}",
            *(f"             {tenant.email}  {tenant.password}" for tenant in state.tenants),
            f"  Last night {state.base_url}/console/morning",
            f"  Canary     {state.base_url}/console/aliases/{release.ALIAS}",
            f"  Doctor     {held}/doctor",
            f"  Version {state.held_version}  {held}",
            f"  Operator   {state.base_url}/admin/",
            f"             {state.operator_email}  {state.operator_password}",
            "",
            "  Try it:",
            f"  curl {state.base_url}/v1/chat/completions \\",
            f"    -H 'Authorization: Bearer {acme.api_key}' -H 'Content-Type: application/json' \\",
            f"    -d {_curl_body(acme.adapter)}",
            "",
            f"  Mail (invites, lost passwords) is in {mail_folder(self.folder)}",
            f"  Logs are in {self.folder / 'logs'}. Ctrl-C stops everything.",
        ]
        self.screen.print("\n".join(lines))


def stop_children(folder: Path) -> bool:
    """Stop the platform and then the servers of a killed run. -> whether any process ran."""
    own = folder / "run" / "demo.json"
    children = [path for path in sorted((folder / "run").glob("*.json")) if path != own]
    stopped = [stop_leftover(path) for path in children]
    return stop_stack(folder / "stack") or any(stopped)


def stop(folder: Path, screen: Screen) -> None:
    """`make demo-stop`: end a run, or the processes that a killed one left."""
    # The run stops its own children, in order; only those that it leaves are stopped here.
    was_running = stop_leftover(folder / "run" / "demo.json")
    had_children = stop_children(folder)
    (folder / "ready.json").unlink(missing_ok=True)
    screen.print("Stopped." if was_running or had_children else "Nothing was running.")


def _asked(coroutine: Coroutine[Any, Any, _T]) -> _T:
    try:
        return asyncio.run(coroutine)
    except (openai.OpenAIError, ValueError) as error:
        raise StepFailed(
            f"the platform did not answer: {error}",
            advice="see .demo/logs/web.log and .demo/logs/worker.log",
        ) from error


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _curl_body(model: str) -> str:
    """Return a request body, quoted for a shell."""
    messages = score.heldout("acme")[2]["messages"]
    return shlex.quote(json.dumps({"model": model, "temperature": 0, "messages": messages}))
