fn silu(x: f32) -> f32 {
  return x / (1.0 + exp(-x));
}

fn softplus(x: f32) -> f32 {  // cannot overflow
  return max(x, 0.0) + log(1.0 + exp(-abs(x)));
}
