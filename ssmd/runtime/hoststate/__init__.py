"""Programs over graphs with flat IO whose state lies in host memory. The runtimes on a processor share them."""
