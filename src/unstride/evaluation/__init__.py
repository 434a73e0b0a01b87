"""Does it help, and what does it cost: metrics, cost, one resumable loop, rows."""
