"""What a program with state may do: the operational semantics of MAPL '17 as code that runs, and what follows."""
