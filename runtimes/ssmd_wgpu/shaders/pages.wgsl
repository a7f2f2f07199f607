{# Where the rows of a slot's cache stand: pages lie anywhere in a buffer that all slots share. #}
fn placed(slot: u32, row: u32) -> u32 {
  return CTL[{{ tables }}u + slot * {{ most_pages }}u + row / {{ page }}u] * {{ page }}u + row % {{ page }}u;
}
