//! Steering: vectors that are added to what layers make of a context's tokens.
//!
//! Turner and others, "Steering Language Models With Activation Engineering" (arXiv 2308.10248), and Rimsky and others,
//! "Steering Llama 2 via Contrastive Activation Addition" (arXiv 2312.06681).

use serde::{Deserialize, Serialize};

/// What is added after which layers, to each token that is steered.
///
/// Vectors of zeros are left out: a steering by them is none, and computes what a context without computes, bit for bit.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(from = "Vec<(usize, Vec<f32>)>", into = "Vec<(usize, Vec<f32>)>")]
pub struct Steering {
    /// By rising number of layers before them.
    vectors: Vec<(usize, Vec<f32>)>, // each [hidden_size]
    fingerprint: [u8; 32],
}

/// What is added to the tokens of a row.
#[derive(Clone, Copy, Debug)]
pub struct Steered<'a> {
    /// What.
    pub steering: &'a Steering,
    /// To tokens of the context from this one on, as the row counts them.
    pub from: usize,
}

/// Why a context is not steered so.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
pub enum SteeringError {
    /// A vector behind the last layer.
    #[error("no vector is added after {n_layers} layers: the model has {n_layers_max}")]
    NoSuchLayer {
        /// Layers before it.
        n_layers: usize,
        /// Layers of the model.
        n_layers_max: usize,
    },
    /// Two vectors in one place.
    #[error("two vectors after {n_layers} layers: one is their sum")]
    LayerTwice {
        /// Layers before them.
        n_layers: usize,
    },
    /// A vector that is not as long as a hidden state.
    #[error("a vector of {length} numbers after {n_layers} layers: a hidden state has {hidden_size}")]
    Length {
        /// Layers before it.
        n_layers: usize,
        /// Its numbers.
        length: usize,
        /// Those of a hidden state.
        hidden_size: usize,
    },
    /// A number that is none, or infinite.
    #[error("number {idx} of the vector after {n_layers} layers is {value}, not finite")]
    NotFinite {
        /// Layers before the vector.
        n_layers: usize,
        /// Which number of the vector.
        idx: usize,
        /// The number.
        value: f32,
    },
    /// More than a step of the device brings.
    #[error("vectors of {n_bytes} bytes: a step takes {n_bytes_max}")]
    TooLarge {
        /// Of all vectors of a context, or of the contexts of one job.
        n_bytes: usize,
        /// The most.
        n_bytes_max: usize,
    },
    /// A first token past the next one.
    #[error("steered from token {from} on: the context has {length}")]
    PastEnd {
        /// The first token to be steered.
        from: usize,
        /// Tokens there are.
        length: usize,
    },
    /// What was computed before an eviction has seen what is gone, and is not computed anew under another steering.
    #[error("{n_evicted} tokens were evicted: a context is steered before that")]
    Evicted {
        /// Those that were taken out.
        n_evicted: usize,
    },
}

impl PartialEq for Steering {
    fn eq(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint
    }
}

impl From<Steering> for Vec<(usize, Vec<f32>)> {
    fn from(steering: Steering) -> Self {
        steering.vectors
    }
}

/// As it arrives. What tells it apart is worked out again: pages are found by that.
impl From<Vec<(usize, Vec<f32>)>> for Steering {
    fn from(vectors: Vec<(usize, Vec<f32>)>) -> Self {
        let fingerprint = fingerprint(&vectors);
        Self { vectors, fingerprint }
    }
}

impl Steering {
    /// Vectors after so many layers each: 0 adds to the embedding of a token, the number of all layers to what the final norm
    /// takes. `None` where all are zeros.
    ///
    /// # Errors
    /// A layer that the model does not have or that is there before, a vector of another length than `hidden_size`, a number
    /// that is not finite.
    pub fn new(
        mut vectors: Vec<(usize, Vec<f32>)>,
        n_layers_max: usize,
        hidden_size: usize,
    ) -> Result<Option<Self>, SteeringError> {
        for (n_layers, vector) in &vectors {
            let (n_layers, length) = (*n_layers, vector.len());
            if n_layers > n_layers_max {
                return Err(SteeringError::NoSuchLayer { n_layers, n_layers_max });
            }
            if length != hidden_size {
                return Err(SteeringError::Length { n_layers, length, hidden_size });
            }
            if let Some((idx, &value)) = vector.iter().enumerate().find(|(_, value)| !value.is_finite()) {
                return Err(SteeringError::NotFinite { n_layers, idx, value });
            }
        }
        vectors.sort_by_key(|&(n_layers, _)| n_layers);
        if let Some(pair) = vectors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(SteeringError::LayerTwice { n_layers: pair[0].0 });
        }
        // Adding zeros would make zeros of negative ones.
        vectors.retain(|(_, vector)| vector.iter().any(|&value| value != 0.0));
        vectors.shrink_to_fit();
        let fingerprint = fingerprint(&vectors);
        Ok((!vectors.is_empty()).then_some(Self { vectors, fingerprint }))
    }

    /// The vectors, by rising number of layers before them.
    pub fn vectors(&self) -> impl ExactSizeIterator<Item = (usize, &[f32])> {
        self.vectors.iter().map(|(n_layers, vector)| (*n_layers, vector.as_slice()))
    }

    /// What is added after so many layers.
    #[must_use]
    pub fn after(&self, n_layers: usize) -> Option<&[f32]> {
        let idx = self.vectors.binary_search_by_key(&n_layers, |&(before, _)| before).ok()?;
        Some(&self.vectors[idx].1)
    }

    /// Tells it apart from every other: a hash over all of it.
    #[must_use]
    pub fn fingerprint(&self) -> &[u8; 32] {
        &self.fingerprint
    }

    /// The memory that it takes.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        self.vectors.iter().map(|(_, vector)| size_of_val(vector.as_slice())).sum()
    }
}

fn fingerprint(vectors: &[(usize, Vec<f32>)]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("trellis steering 1");
    for (n_layers, vector) in vectors {
        hasher.update(&(*n_layers as u64).to_le_bytes());
        vector.iter().for_each(|value| {
            hasher.update(&value.to_le_bytes());
        });
    }
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(vectors: &[(usize, &[f32])]) -> Result<Option<Steering>, SteeringError> {
        let vectors = vectors.iter().map(|&(n_layers, vector)| (n_layers, vector.to_vec())).collect();
        Steering::new(vectors, 6, 2)
    }

    #[test]
    fn zeros_are_no_steering() {
        assert_eq!(new(&[]), Ok(None));
        assert_eq!(new(&[(3, &[0.0, -0.0]), (0, &[0.0, 0.0])]), Ok(None));
        let some = new(&[(6, &[0.0, 1.0]), (3, &[0.0, 0.0])]).expect("it fits").expect("it is some");
        assert_eq!(some, new(&[(6, &[0.0, 1.0])]).expect("it fits").expect("it is some"));
        assert_eq!((some.after(3), some.after(6), some.n_bytes()), (None, Some(&[0.0, 1.0][..]), 8));
    }

    #[test]
    fn order_is_nothing_and_every_number_and_layer_counts() {
        let of =
            |vectors: &[(usize, &[f32])]| *new(vectors).expect("it fits").expect("it is some").fingerprint();
        let base = of(&[(1, &[1.0, 2.0]), (4, &[3.0, 4.0])]);
        assert_eq!(base, of(&[(4, &[3.0, 4.0]), (1, &[1.0, 2.0])]));
        for other in [
            &[(1, &[1.0, 2.0][..]), (5, &[3.0, 4.0][..])][..],
            &[(1, &[1.0, 2.0]), (4, &[3.0, -4.0])],
            &[(1, &[1.0, 2.0])],
            &[(4, &[1.0, 2.0]), (1, &[3.0, 4.0])],
        ] {
            assert_ne!(base, of(other), "{other:?}");
        }
    }

    #[test]
    fn what_does_not_fit_is_said_with_its_numbers() {
        let said = |vectors| new(vectors).expect_err("it does not fit").to_string();
        assert_eq!(said(&[(7, &[0.0, 0.0])]), "no vector is added after 7 layers: the model has 6");
        assert_eq!(said(&[(2, &[1.0])]), "a vector of 1 numbers after 2 layers: a hidden state has 2");
        let infinite = &[(0, &[1.0, 1.0][..]), (2, &[1.0, f32::NEG_INFINITY])];
        assert_eq!(said(infinite), "number 1 of the vector after 2 layers is -inf, not finite");
        let twice = &[(2, &[1.0, 1.0][..]), (1, &[1.0, 1.0]), (2, &[0.0, 0.0])];
        assert_eq!(said(twice), "two vectors after 2 layers: one is their sum");
    }
}
