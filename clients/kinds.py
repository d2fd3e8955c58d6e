"""The clients: what each needs, how it is called, and what its own report must say for the run to count.

A run returns what it measured, in a few words, or raises ClientFailure.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.routers import router
from clients.setting import FOLDER, ROOT, TOKENIZER, ClientFailure, Setting, book, llamacpp_server
from slipstream.bench.harness.mtp_bench_prompts import MTP_BENCH_PROMPTS

Run = Callable[[Setting, str], str]  # the server's address


@dataclass(frozen=True)
class Client:
    run: Run
    requirements: tuple[str, ...] = ()
    drafts_or_not: bool = False  # run it once more on a server that does not draft: it must say the same


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise ClientFailure(what)


def only(folder: Path, pattern: str) -> Any:
    """The JSON of the one file, wherever the client put it."""
    found = sorted(folder.rglob(pattern))
    expect(len(found) == 1, f"{len(found)} files {pattern}")
    return json.loads(found[0].read_text())


def script(name: str) -> Run:
    def run(setting: Setting, url: str) -> str:
        return setting.run("python", str(FOLDER / "scripts" / name), url).splitlines()[-1]

    return run


def mtp_bench(setting: Setting, url: str) -> str:
    output = setting.run("python", "-m", "clients.scripts.mtp_bench", url, "48", cwd=ROOT)
    found = json.loads(output.splitlines()[-1])
    expect(found["requests"] == len(MTP_BENCH_PROMPTS), "a prompt without an answer")
    expect(found["draft_n"] > 0, "no drafts")
    return f"{found['predicted_n']} tokens, {found['draft_n_accepted']} of {found['draft_n']} drafts accepted"


def chat_turns(setting: Setting, url: str) -> str:
    """A chat of 20 turns by two packages, with the prefix cache and without it, next to llama.cpp's server."""
    with llamacpp_server() as peer:
        output = setting.run("python", str(FOLDER / "scripts" / "chat_turns.py"), url, *filter(None, [peer]))
    found = json.loads(output.splitlines()[-1])
    (setting.work / "turns.json").write_text(json.dumps(found, indent=1))
    for name in ("openai", "anthropic"):
        ours = found[name]
        expect(ours["same_texts"] == len(ours["turns"]), f"{name}: another text without the cache")
        expect(all(turn["cached_tokens"] for turn in ours["turns"][1:]), f"{name}: a turn without cached tokens")
    rows = [(name, row["first_ms"], row["first_ms_off"]) for name, row in found.items()]
    return ", ".join(f"{name} {ms:.0f} ms" + (f" ({off:.0f} without)" if off else "") for name, ms, off in rows)


def aiperf(setting: Setting, url: str) -> str:
    arguments = ["--model", "llama", "--tokenizer", TOKENIZER, "--url", url, "--endpoint-type", "chat", "--streaming"]
    arguments += ["--concurrency", "2", "--request-count", "6", "--synthetic-input-tokens-mean", "32"]
    arguments += ["--output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true", "--ui", "none"]
    arguments += ["--artifact-dir", str(setting.work / "out")]
    setting.run("aiperf", "profile", *arguments)
    report = only(setting.work / "out", "profile_export_aiperf.json")
    good = report["request_count"]["avg"]
    expect(good == 6 and not report.get("error_summary"), f"{good} of 6 requests, {report.get('error_summary')}")
    speed, length = (report[key]["avg"] for key in ("output_token_throughput", "spec_decode_acceptance_length"))
    return f"{good:g} requests, {speed:.1f} tok/s, acceptance length {length:.2f}"


def evalscope(setting: Setting, url: str) -> str:
    prompts = setting.work / "prompts.txt"
    prompts.write_text("\n".join(text.replace("\n", " ") for text in MTP_BENCH_PROMPTS.values()))
    arguments = ["--url", f"{url}/v1/chat/completions", "--model", "llama", "--parallel", "2", "--number", "6"]
    arguments += ["--dataset", "line_by_line", "--dataset-path", str(prompts), "--max-tokens", "16"]
    arguments += ["--outputs-dir", str(setting.work / "out")]
    setting.run("evalscope", "perf", *arguments)
    report = only(setting.work / "out", "benchmark_summary.json")
    good, failed = report["Success Requests"], report["Failed Requests"]
    expect(good == 6 and failed == 0, f"{good} of 6 requests, {failed} failed")
    speed, accepted = report["Output Throughput (tok/s)"], report["Spec. Accept Rate"]
    return f"{good} requests, {speed:.1f} tok/s, acceptance {accepted}"


def guidellm(setting: Setting, url: str) -> str:
    arguments = ["--backend", f"kind=openai_http,target={url}"]
    arguments += ["--profile", "kind=concurrent,streams=2"]
    arguments += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"]
    arguments += ["--tokenizer", f"kind=hf_auto,model={TOKENIZER}", "--constraint", "kind=max_requests,count=6"]
    arguments += ["--output", "kind=json,path=benchmarks.json", "--disable-progress"]
    setting.run("guidellm", "run", *arguments)
    [benchmark] = only(setting.work, "benchmarks.json")["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    expect(totals["successful"] >= 6 and totals["errored"] == 0, f"requests: {totals}")
    speed = benchmark["metrics"]["output_tokens_per_second"]["successful"]["mean"]
    return f"{totals['successful']} requests, {speed:.1f} tok/s"


def llama_benchy(setting: Setting, url: str) -> str:
    result = setting.work / "result.json"
    arguments = ["--base-url", f"{url}/v1", "--model", "llama", "--tokenizer", str(_tokenizer_folder(setting))]
    arguments += ["--pp", "64", "--tg", "16", "--runs", "2", "--no-cache", "--format", "json"]
    arguments += ["--save-result", str(result), "--exit-on-first-fail"]
    with book() as address:
        output = setting.run("llama-benchy", *arguments, "--book-url", address)
    expect("Coherence test PASSED" in output, "its question about France was not answered")
    expect("No complete token_ids" not in output, "answers without token_ids")
    [row] = json.loads(result.read_text())["benchmarks"]
    speed = row["tg_throughput"]["mean"]
    expect(speed > 0, "no speed")
    return f"{speed:.1f} tok/s"


def _tokenizer_folder(setting: Setting) -> Path:
    [file] = setting.hub.rglob("tokenizer.json")
    return file.parent


def lm_eval(setting: Setting, url: str) -> str:
    """Scores and every answer of two small tasks: log-likelihoods by completions, texts by chat."""
    address = f"model=llama,num_concurrent=4,max_retries=1,timeout=600,base_url={url}/v1"
    own = f"tokenizer_backend=huggingface,tokenizer={TOKENIZER}"
    choice = _lm_eval_task(setting, "capitals_choice", "local-completions", f"{address}/completions,{own}", "4")
    text = _lm_eval_task(
        setting, "capitals_text", "local-chat-completions", f"{address}/chat/completions", "1", "--apply_chat_template"
    )
    scores = f"acc {choice['acc,none']:.3f}, exact match {text['exact_match,none']:.3f}"
    return f"{scores}, answers {choice['answers']:08x} {text['answers']:08x}"


def _lm_eval_task(setting: Setting, task: str, model: str, arguments: str, batch: str, *more: str) -> dict[str, Any]:
    out = setting.work / task
    command = ["--model", model, "--model_args", arguments, "--tasks", task, "--include_path", "."]
    command += ["--batch_size", batch, "--output_path", str(out), "--log_samples", *more]
    setting.run("lm_eval", "run", *command, cwd=FOLDER / "lm_eval")
    scores: dict[str, Any] = only(out, "results_*.json")["results"][task]
    [samples] = out.rglob("samples_*.jsonl")
    answers = [json.loads(line)["resps"] for line in samples.read_text().splitlines()]
    expect(len(answers) == 8, f"{len(answers)} of 8 answers")
    return {**scores, "answers": zlib.crc32(json.dumps(answers).encode())}


CLIENTS = {
    "mtp-bench": Client(mtp_bench),
    "openai": Client(script("openai_sdk.py"), ("openai",)),
    "anthropic": Client(script("anthropic_sdk.py"), ("anthropic",)),
    "ollama": Client(script("ollama_sdk.py"), ("ollama",)),
    "chat-turns": Client(chat_turns, ("openai", "anthropic")),
    "llama-benchy": Client(llama_benchy, ("llama-benchy",)),
    "lm-eval": Client(lm_eval, ("lm-eval[api]", "transformers"), drafts_or_not=True),
    "evalscope": Client(evalscope, ("evalscope[perf]",)),
    "aiperf": Client(aiperf, ("aiperf",)),
    "guidellm": Client(guidellm, ("torch==2.13.0", "guidellm")),
    "vllm-router": Client(router("vllm-router", "--policy", "consistent_hash"), ("vllm-router",)),
    "sglang-router": Client(router("sglang-router", "launch"), ("sglang-router",)),
}
