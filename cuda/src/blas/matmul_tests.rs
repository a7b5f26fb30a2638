//! Buckets everywhere; products where there is a device.

use super::*;
use crate::Buffer;
use crate::ops::common::check::*;
use crate::testing::{Random, TestGpu, gpu};

#[test]
fn every_count_is_in_a_bucket_that_is_little_larger() {
    for n_tokens in 1..=10_000 {
        let bucket = bucket(n_tokens);
        assert!(bucket >= n_tokens, "{n_tokens} in {bucket}");
        assert!(2 * n_tokens > bucket, "{n_tokens} in {bucket}");
        assert!(n_tokens <= 16 || 3 * n_tokens > 2 * bucket, "{n_tokens} in {bucket}");
        assert_eq!(super::bucket(bucket), bucket);
        let tuned = tuned(n_tokens);
        assert!(
            (n_tokens..=bucket).contains(&tuned) && super::tuned(tuned) == tuned,
            "{n_tokens} as {tuned}"
        );
    }
}

#[test]
fn counts_that_are_tuned() {
    assert_eq!(all_tuned(100), [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]);
    assert_eq!(all_tuned(600)[12..], [256, 288, 320, 352, 384, 416, 448, 480, 512, 768]);
    assert_eq!(all_tuned(1), [1]);
    assert!(all_tuned(0).is_empty());
}

fn workspace(test: &TestGpu) -> Buffer {
    test.gpu.allocate("a workspace", 32 << 20).expect("device memory")
}

/// One product against f64.
fn check_product(test: &TestGpu, blas: &Blas, random: &mut Random, shape: MatmulShape) {
    let MatmulShape { n_tokens, n_out, n_in, dtype, out, update } = shape;
    let x = rounded(dtype, &random.normals(n_tokens * n_in));
    let w = rounded(dtype, &random.normals(n_out * n_in));
    let out_dtype = if out == Element::Model { dtype } else { Dtype::F32 };
    let before = rounded(out_dtype, &random.normals(n_tokens * n_out));
    let (d_x, d_w) = (upload_as(test, dtype, &x), upload_as(test, dtype, &w));
    let d_y = match update {
        Update::Replace => poisoned(test, n_tokens * n_out * out_dtype.n_bytes()),
        Update::Add => upload_as(test, out_dtype, &before),
    };
    blas.matmul(&test.stream, shape, d_x.slice(), d_w.slice(), d_y.slice()).expect("a product");
    let got = download_as(test, out_dtype, d_y.slice(), n_tokens * n_out);
    for token in 0..n_tokens {
        for row in 0..n_out {
            let (mut sum, mut size) = (0.0, 0.0);
            for k in 0..n_in {
                let term = f64::from(x[token * n_in + k]) * f64::from(w[row * n_in + k]);
                (sum, size) = (sum + term, size + term.abs());
            }
            if update == Update::Add {
                sum += f64::from(before[token * n_out + row]);
            }
            let got = f64::from(got[token * n_out + row]);
            // Sums of f32 in unknown order; TF32 would be off by 2^-11 of the terms, 50 times this.
            let tolerance = 1e-5 * size + 1e-6 + 1.01 * rounding(out_dtype) * sum.abs();
            let diff = (got - sum).abs();
            assert!(diff <= tolerance, "{shape:?}: [{token}, {row}] is {got}, not {sum} (±{tolerance:e})");
        }
    }
}

#[test]
fn agrees_with_the_reference() {
    let Some(test) = gpu() else { return };
    let workspace = workspace(&test);
    let handle = Handle::new(&test.gpu).expect("the library");
    let blas = Blas::new(&test.gpu, handle, workspace.slice(), None).expect("the library");
    let mut random = Random(12);
    for dtype in DTYPES {
        for (n_tokens, n_out, n_in) in [(1, 8, 8), (3, 17, 40), (33, 100, 256), (130, 384, 512), (17, 33, 31)]
        {
            for (out, update) in [
                (Element::Model, Update::Replace),
                (Element::F32, Update::Replace),
                (Element::F32, Update::Add),
            ] {
                let shape = MatmulShape { n_tokens, n_out, n_in, dtype, out, update };
                check_product(&test, &blas, &mut random, shape);
            }
        }
    }
}

#[test]
fn timings_are_remembered_and_right() {
    let Some(test) = gpu() else { return };
    let workspace = workspace(&test);
    let handle = Handle::new(&test.gpu).expect("the library");
    let dir = tempfile::tempdir().expect("a directory");
    let mut random = Random(13);
    let shape =
        |n_tokens, dtype, out, update| MatmulShape { n_tokens, n_out: 384, n_in: 512, dtype, out, update };
    let shapes = [
        shape(1, Dtype::Bf16, Element::Model, Update::Replace),
        shape(48, Dtype::Bf16, Element::F32, Update::Add),
        shape(48, Dtype::F32, Element::Model, Update::Replace),
    ];
    let open =
        || Blas::new(&test.gpu, handle, workspace.slice(), Some(dir.path().to_owned())).expect("the library");
    let first = open();
    assert!(!first.is_tuned(shapes[0]));
    first.tune(&test.stream, &shapes, &|| false).expect("timings");
    let second = open();
    for blas in [&first, &second] {
        for shape in shapes {
            assert!(blas.is_tuned(shape));
            check_product(&test, blas, &mut random, shape);
            // Fewer tokens of the same bucket.
            let n_tokens = shape.n_tokens * 3 / 4 + 1;
            check_product(&test, blas, &mut random, MatmulShape { n_tokens, ..shape });
        }
    }
}
