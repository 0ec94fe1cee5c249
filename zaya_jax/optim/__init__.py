"""What turns gradients into updates: Muon and AdamW, ZeRO-1, schedules, balancing, skipped updates."""
