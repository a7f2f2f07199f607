{# Value i of the vectors P of a part of a layer: see Vectors in resident.py. #}
fn p(i: u32) -> f32 {
  return P[i / 4u][i % 4u];
}
