//! Masks whose making panics.

use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::constraint::{Begins, Constraint, ConstraintError, ConstraintLimits, Grammar};
use crate::cpu::{CpuBackend, CpuOptions};
use crate::model::ModelConfig;
use crate::sampling::TokenMask;
use crate::{EngineSettings, OneModel};

/// Long enough for what happens at once to have happened.
const SOON: Duration = Duration::from_secs(60);

fn soon<T>(future: impl Future<Output = T>) -> T {
    let (mut future, begun) = (pin!(future), Instant::now());
    loop {
        match future.as_mut().poll(&mut task::Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => return result,
            Poll::Pending if begun.elapsed() > SOON => panic!("it waits forever"),
            Poll::Pending => thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// An engine whose backend has a token less than the model's tokenizer: a mask for its draws and one of a grammar do not go
/// together.
fn engine_of_fewer_tokens() -> OneModel {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
    let model = Model::open("tiny", &ModelSource::Folder(folder)).expect("the bundled model opens");
    let config = ModelConfig { vocab_size: model.config.vocab_size - 1, ..model.config.clone() };
    let options =
        CpuOptions { n_pages: 64, n_host_pages: 0, n_threads: None, n_rows_max: 8, n_tokens_max: 64 };
    let backend = CpuBackend::with_tensors::<BackendError>(&config, &options, |_, values| {
        values.fill(0.01);
        Ok(())
    });
    OneModel::start(Arc::new(model), Box::new(backend.expect("there is memory")), EngineSettings::default())
}

#[test]
fn a_mask_whose_making_panics_ends_its_run_alone() {
    let engine = engine_of_fewer_tokens();
    let model = engine.handle();
    let owner = owner(Budget::UNLIMITED);
    let vocab_size = model.limits().vocab_size;
    let grammar = Grammar::Regex("[a-z]{1,99}".to_owned());
    let constraint = Constraint::compile(&grammar, model, ConstraintLimits::default(), &owner.account);
    let constraint = Arc::new(constraint.expect("a grammar"));
    let settings = |mask: Option<TokenMask>| RunSettings {
        sampler: Arc::new(Sampler { mask: mask.map(Arc::new), ..Sampler::greedy() }),
        stop_tokens: Arc::new([]),
        n_tokens_max: None,
        ahead: Ahead::Adaptive,
        masks: MaskSource::Sampler,
    };
    let context = || {
        let mut context = soon(Context::create(model, owner.clone())).expect("there is room");
        soon(context.append(&[1, 2, 3])).expect("there is room");
        context
    };
    let draws = |context: &mut Context, key| {
        let pulled = soon(context.pull(RunKey(key), || settings(None)));
        assert!(matches!(pulled, Ok(Pull::Token(_))), "{pulled:?}");
    };
    let (mut context, mut other) = (context(), context());
    draws(&mut other, 0);
    for key in 1..=3 {
        context.keep_to(Some(&Arc::new(Rule::new(constraint.clone(), Begins::FirstDraw))));
        let pulled = soon(context.pull(RunKey(key), || settings(Some(TokenMask::all(vocab_size)))));
        let Err(EngineError::Constraint(ConstraintError::TooComplex { reason })) = pulled else {
            panic!("{pulled:?}")
        };
        assert!(reason.contains("panicked"), "{reason}");
        // The context is of use, and so are others.
        context.keep_to(None);
        draws(&mut context, 10 + key);
        draws(&mut other, 0);
    }
    drop((context, other, constraint));
    soon(model.stats()).expect("the engine goes on");
    for what in [Resource::HostBytes, Resource::Pages, Resource::Contexts] {
        assert_eq!(owner.account.used(what), 0, "{what:?}");
    }
}
