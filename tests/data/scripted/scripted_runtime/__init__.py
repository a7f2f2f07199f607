"""A runtime for tests whose models say what a file has, for agents whose tasks a tiny model cannot do."""
