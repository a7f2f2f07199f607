{# The factor on value d of what a head gives: the sigmoid of its gate, which stands after a row's values. #}
fn gate_of(row: u32, head: u32, d: u32) -> f32 {
  return 1.0 / (1.0 + exp(-QKV[((row * 2u + 1u) * (H + G) + G + head) * D + d]));
}
