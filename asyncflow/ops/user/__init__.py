"""Operations of users' own: functions, and modules of PyTorch."""
