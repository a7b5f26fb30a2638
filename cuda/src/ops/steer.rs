//! What is added to the residual stream of steered tokens, between layers.

use std::sync::Arc;

use trellis_engine::Steering;

use super::common::{ROW_THREADS, RowCount, expect, expect_i32, expect_rows, i32_of, over_rows};
use crate::compile::Deferred;
use crate::driver::params;
use crate::{Compiler, CudaError, Gpu, Kernel, Pointer, Slice, Source, Stream};

/// The place of what is added to a token that is not steered.
pub const NOWHERE: u32 = u32::MAX;

/// Words that tables and vectors are multiples of: the widest access.
const ALIGNMENT: usize = 4;

/// As in `steer.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct SteerParams {
    x: Pointer,
    places: Pointer,
    memory: Pointer,
    n_tokens: Pointer,
    n: i32,
    n_layers: i32,
}
params!(SteerParams, 40);

/// The kernel's source.
#[must_use]
pub fn source() -> Source {
    Source::new("steer.cu", concat!(include_str!("common.cuh"), include_str!("steer.cu")))
        .with("N_THREADS", ROW_THREADS)
        .with("NOWHERE", format!("{NOWHERE}u"))
}

/// Writes a steering as the kernel reads it: a table of so many layers, then the vectors.
///
/// # Panics
/// It has a vector after more layers.
pub fn write(steering: &Steering, n_layers_max: usize, words: &mut Vec<u32>) {
    let first = words.len();
    let table_end = first + n_layers_max + 1;
    words.resize(first + (n_layers_max + 1).next_multiple_of(ALIGNMENT), 0);
    for (n_layers, vector) in steering.vectors() {
        let place = first + n_layers;
        assert!(place < table_end, "a vector after {n_layers} of {n_layers_max} layers");
        words[place] = (words.len() - first) as u32;
        words.extend(vector.iter().map(|value| value.to_bits()));
        words.resize(first + (words.len() - first).next_multiple_of(ALIGNMENT), 0);
    }
}

/// What is added to the tokens of a step.
#[derive(Clone, Copy, Debug)]
pub struct SteeringPlaces {
    /// Where the table for each token begins in `memory`, in words, or [`NOWHERE`]; a multiple of 4.
    pub places: Slice, // u32 [n_tokens]
    /// What [`write()`] has written.
    pub memory: Slice,
}

/// Adds vectors to rows; see `steer.cu`.
#[derive(Clone, Debug)]
pub struct Steer {
    kernel: Arc<Deferred<Kernel<SteerParams>>>,
}

impl Steer {
    /// The kernel, not compiled yet: few contexts are steered.
    #[must_use]
    pub fn new(gpu: &Gpu, compiler: &Compiler) -> Self {
        Self { kernel: Arc::new(Deferred::new(gpu, compiler, source(), |module| module.kernel("steer"))) }
    }

    /// Has a thread compile the kernel.
    pub fn begin(&self) {
        self.kernel.begin();
    }

    /// Loads the kernel if it is not there yet.
    ///
    /// # Errors
    /// It does not compile, or the driver refused it.
    pub fn load(&self) -> Result<(), CudaError> {
        self.kernel.get().map(|_| ())
    }

    /// Adds to the rows of steered tokens what is added after so many layers. Every place is that of a table for more layers,
    /// whose vectors are as long as a row.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short.
    pub fn run(
        &self,
        stream: &Stream,
        tokens: RowCount,
        hidden_size: usize,
        n_layers: usize,
        steering: SteeringPlaces,
        x: Slice, // f32 [n_tokens, hidden_size]
    ) -> Result<(), CudaError> {
        if tokens.n_max == 0 {
            return Ok(());
        }
        expect_rows(tokens);
        expect("x", x, tokens.n_max * hidden_size, 4);
        expect("memory", steering.memory, ALIGNMENT, 4);
        expect_i32("places", steering.places, tokens.n_max);
        let params = SteerParams {
            x: x.into(),
            places: steering.places.into(),
            memory: steering.memory.into(),
            n_tokens: tokens.n.into(),
            n: i32_of(hidden_size),
            n_layers: i32_of(n_layers),
        };
        // SAFETY: lengths were checked above; the caller keeps the count at most `n_max`, and places those of tables that
        // `write` has written for the model, inside `memory`.
        unsafe { over_rows(tokens, hidden_size).run(stream, self.kernel.get()?, &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::common::check::*;
    use crate::testing::{Random, gpu};

    const N_LAYERS: usize = 5;

    #[test]
    fn compiles() {
        assert_compiles(source());
    }

    fn steering(random: &mut Random, n_layers: &[usize], hidden_size: usize) -> Steering {
        let vectors = n_layers.iter().map(|&n_layers| (n_layers, random.normals(hidden_size))).collect();
        Steering::new(vectors, N_LAYERS, hidden_size).expect("it fits").expect("it is some")
    }

    #[test]
    fn a_table_says_where_each_vector_begins() {
        let vector = |value: f32| vec![value; 3];
        let steering = Steering::new(vec![(1, vector(1.0)), (5, vector(2.0))], N_LAYERS, 3);
        let mut words = vec![7; 4];
        write(&steering.expect("it fits").expect("it is some"), N_LAYERS, &mut words);
        let [one, two] = [1f32, 2.0].map(f32::to_bits);
        let expected = [7, 7, 7, 7, 0, 8, 0, 0, 0, 12, 0, 0, one, one, one, 0, two, two, two, 0];
        assert_eq!(words, expected);
    }

    #[test]
    fn agrees_with_the_reference() {
        let Some(test) = gpu() else { return };
        let kernel = Steer::new(&test.gpu, &test.compiler());
        let mut random = Random(11);
        for (n_max, n, hidden_size) in [(1, 1, 1), (3, 2, 35), (9, 8, 4096), (40, 33, 96), (2, 2, 8190)] {
            let steerings = [&[0, 2, 5][..], &[2], &[0]].map(|it| steering(&mut random, it, hidden_size));
            let mut words = vec![u32::MAX; 8];
            let tables = steerings.each_ref().map(|steering| {
                let start = words.len() as u32;
                write(steering, N_LAYERS, &mut words);
                start
            });
            // Each fourth token has none.
            let places: Vec<u32> = (0..n_max).map(|t| *tables.get(t % 4).unwrap_or(&NOWHERE)).collect();
            let mut x = random.normals(n_max * hidden_size);
            // Where nothing is added, a negative zero stays one.
            x.iter_mut().step_by(7).for_each(|value| *value = -0.0);
            let (d_places, d_words, d_x) = (upload(&test, &places), upload(&test, &words), upload(&test, &x));
            let count = DeviceCount::new(&test, n_max, n);
            for n_layers in 0..=N_LAYERS {
                let steering = SteeringPlaces { places: d_places.slice(), memory: d_words.slice() };
                kernel
                    .run(&test.stream, count.rows(), hidden_size, n_layers, steering, d_x.slice())
                    .expect("a launch");
                for (t, row) in x.chunks_mut(hidden_size).enumerate().take(n) {
                    if let Some(vector) = steerings.get(t % 4).and_then(|steering| steering.after(n_layers)) {
                        row.iter_mut().zip(vector).for_each(|(value, added)| *value += added);
                    }
                }
                // One f32 addition, as here: exact, to the sign of a zero.
                let got = download(&test, d_x.slice(), n_max * hidden_size, 0f32);
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                assert!(bits(&got) == bits(&x), "rows of {hidden_size} after {n_layers} layers");
            }
        }
    }
}
