"""Runs in the short tables of the pages; the tables of the appendix have all."""

from __future__ import annotations

# Rows by source, in the order of the page.
SUMMARIES: dict[str, tuple[str, ...]] = {
    "top-k": ("topka", "topka-nofeedback", "gtopk", "oktopk", "oktopk-2%", "gaussiank"),
    "PowerSGD": (
        "fp16",
        "powersgd-4",
        "powersgd-8",
        "powersgd-4-nesterov",
        "powersgd-8-nesterov",
        "recommended-0.5%",
    ),
    "Recommended": (
        "dense-nesterov",
        "recommended",
        "recommended-0.5%",
        "recommended-0.3%",
        "recommended-0.2%",
        "heavy-1%",
    ),
    "Learning rates": (
        "dense-nesterov-tuned",
        "recommended-tuned",
        "powersgd-4-nesterov-tuned",
        "dense-adam-tuned",
        "recommended-adam-tuned",
    ),
    "Muon": (
        "dense-muon",
        "dense-muon-short",
        "recommended-muon",
        "muon-short-16bit",
        "muon-short-4bit",
        "local-1-muon-short",
    ),
    "Later methods": ("union-1%", "sidco-1%", "micro-1%", "artopk-1%", "spardl-1%", "arctopk-1%"),
    "Ahead": ("dense", "ahead-mean", "ahead-own"),
    "Longer": (
        "dense-nesterov-4x",
        "recommended-4x",
        "topka-4x",
        "stable-b64-r5-4x",
        "randomblock-none-4x",
        "randomblock-4x",
    ),
    "Fully sharded": ("fsdp2", "sharded-recommended-4%-8bit", "sharded-4%-8bit"),
    "Local steps": (
        "local-1-1%-32bit",
        "local-8-1%-32bit",
        "local-32-1%-32bit",
        "local-1-1%-4bit",
        "local-8-1%-4bit",
        "local-8-3%-32bit",
    ),
    "Stable Top-K": (
        "oktopk-10%",
        "stable-22%",
        "stable-b1-r5",
        "stable-b64-r5",
        "stable-b64-r100",
        "stable-b4096-r5",
    ),
    "ConEF": ("dense-plain", "randomblock-none", "randomblock", "conef-60", "conef-90", "iconef-90"),
    "GraVAC": ("topka-10", "topka-1000", "dgc-1000", "gravac-0.49", "gravac-0.7", "gravac-0.9"),
}
