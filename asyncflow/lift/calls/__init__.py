"""Calls whose rows come from any runs: functions and loops."""
