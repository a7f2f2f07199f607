{# What the workgroups of attention.wgsl found in their pages of a head's cache, put together: `count` parts from `first` on,
   each D sums, the largest score and the weight. #}
fn largest_of(first: u32, count: u32) -> f32 {
  var largest = -3.4e38;
  for (var i = 0u; i < count; i++) { largest = max(largest, PARTS[first + i * (D + 2u) + D]); }
  return largest;
}

fn merged(first: u32, count: u32, largest: f32, d: u32) -> f32 {  // the sums D, or the weight D + 1
  var sum = 0.0;
  for (var i = 0u; i < count; i++) {
    let at = first + i * (D + 2u);
    sum = fma(PARTS[at + d], exp(PARTS[at + D] - largest), sum);
  }
  return sum;
}
