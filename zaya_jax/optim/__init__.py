"""Turns gradients into updates: Muon and AdamW, ZeRO-1, balancing, skipped updates."""
