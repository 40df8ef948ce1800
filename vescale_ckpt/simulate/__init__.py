"""Plans of saves by jobs that need not exist: who would write how much, and what planning it costs."""
