//! What is added between layers.

use crate::bindings::trellis::host::contexts::SteeringVector;

/// Vectors that are added to what layers make of a context's tokens, put on with [`Context::steer`](crate::Context::steer).
///
/// Layers count as in [`Context::hidden`](crate::Context::hidden): 0 adds to the embedding, i to what the first i layers make.
/// The hidden state after the last layer has been through the final norm, what is added there has not: differences are better
/// taken before.
#[derive(Clone, Debug, Default)]
pub struct Steering {
    vectors: Vec<SteeringVector>,
}

impl Steering {
    /// Nothing: it takes off what a context was steered by.
    pub fn none() -> Self {
        Self::default()
    }

    /// A vector after so many layers, beside those that there are; of two after as many layers, their sum.
    ///
    /// # Panics
    /// Two after as many layers are of different lengths.
    #[must_use]
    pub fn and(mut self, layer: u32, values: Vec<f32>) -> Self {
        match self.vectors.iter_mut().find(|vector| vector.layer == layer) {
            Some(vector) => {
                assert_eq!(vector.values.len(), values.len(), "vectors of one model");
                vector.values.iter_mut().zip(values).for_each(|(value, more)| *value += more);
            }
            None => self.vectors.push(SteeringVector { layer, values }),
        }
        self
    }

    /// What leads from some hidden states to others, layer by layer, as [`Context::hidden`](crate::Context::hidden) has given
    /// them for these layers.
    ///
    /// # Panics
    /// There are more or fewer states than layers, or two are of different lengths.
    pub fn difference(layers: &[u32], to: &[Vec<f32>], from: &[Vec<f32>]) -> Self {
        assert!(layers.len() == to.len() && to.len() == from.len(), "a state for each layer");
        layers.iter().zip(to.iter().zip(from)).fold(Self::none(), |steering, (&layer, (to, from))| {
            assert_eq!(to.len(), from.len(), "hidden states of one model");
            steering.and(layer, to.iter().zip(from).map(|(to, from)| to - from).collect())
        })
    }

    /// So many times as much of everything.
    #[must_use]
    pub fn times(mut self, factor: f32) -> Self {
        let values = self.vectors.iter_mut().flat_map(|vector| &mut vector.values);
        values.for_each(|value| *value *= factor);
        self
    }

    pub(crate) fn raw(&self) -> &[SteeringVector] {
        &self.vectors
    }

    /// What it takes of a call.
    pub(crate) fn n_bytes(&self) -> usize {
        self.vectors.iter().map(|vector| size_of_val(vector.values.as_slice()) + size_of::<u32>()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_add_up_by_layer() {
        let one =
            Steering::difference(&[2, 5], &[vec![3.0, 1.0], vec![0.5; 2]], &[vec![1.0; 2], vec![0.0; 2]]);
        let both = one.times(2.0).and(5, vec![0.0, 4.0]).and(0, vec![1.0, 1.0]);
        let found: Vec<(u32, &[f32])> =
            both.raw().iter().map(|vector| (vector.layer, vector.values.as_slice())).collect();
        assert_eq!(found, [(2, &[4.0, 0.0][..]), (5, &[1.0, 5.0]), (0, &[1.0, 1.0])]);
        assert_eq!(both.n_bytes(), 3 * 12);
    }
}
