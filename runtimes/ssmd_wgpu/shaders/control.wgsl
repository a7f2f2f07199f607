{# What a call is about, in words. A decode step: of stream r at 4 r its position, the number of streams, its slot, 0. A
   prefill: the position, the number of tokens T, the slot, 0. After these words the tokens, and after them of every
   slot which pages its rows stand in. #}
@group(1) @binding(0) var<storage, read> CTL: array<u32>;  // as slots.py writes it
