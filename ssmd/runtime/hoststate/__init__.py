"""Programs over graphs with flat IO whose state the host keeps: what the runtimes on a processor share."""
