//! `samplers`

use std::sync::Arc;

use trellis_engine::ModelHandle;
use trellis_engine::account::HostCharge;
use trellis_engine::asked::N_BIAS_MAX;
use trellis_engine::sampling::program::{N_HANDLES_MAX, N_PARAMETERS_MAX, PutOn};
use trellis_engine::sampling::{Sampler, SamplerError, TokenMask};
use wasmtime::component::Resource;

use super::convert::{check_same_model, check_tokens, invalid};
use super::types::{
    Given, GuestBias, GuestConstraint, GuestMask, GuestModel, GuestProgram, GuestSampler, HeldMask, HostError,
};
use crate::guest::bindings::trellis::host::constraints::Beginning;
use crate::guest::bindings::trellis::host::samplers::{Host, HostSampler, HostTokenMask};
use crate::guest::error::GuestFault;
use crate::guest::held::HeldModel;
use crate::guest::store::GuestState;

impl GuestSampler {
    /// The settings for a draw with this model.
    pub(super) fn for_model(&self, model: &ModelHandle) -> Result<Arc<Sampler>, HostError> {
        self.check_models(model)?;
        self.settings.validate(model.limits().vocab_size)?;
        Ok(self.settings.clone())
    }

    /// Whether all that it is given is of this model.
    pub(super) fn check_models(&self, model: &ModelHandle) -> Result<(), HostError> {
        let Given { mask, bias: _, program, masks, biases, constraint } = &self.given;
        let of_masks = mask.iter().chain(masks).map(|mask| &mask.model);
        let of_program = program.iter().map(|program| &program.model);
        let of_program = of_program.chain(constraint.iter().map(|given| &given.held.model));
        for other in of_masks.chain(of_program).chain(biases.iter().map(|bias| &bias.model)) {
            check_same_model(model, other)?;
        }
        Ok(())
    }
}

impl GuestState {
    /// Checks a change to a sampler by itself, then makes it.
    fn set(
        &mut self,
        sampler: &Resource<GuestSampler>,
        change: impl Fn(&mut Sampler),
    ) -> Result<(), HostError> {
        let mut alone = Sampler::greedy();
        change(&mut alone);
        // Tokens are checked against a vocabulary when the sampler is used with a model.
        alone.validate(usize::MAX)?;
        change(Arc::make_mut(&mut self.chain(sampler)?.settings));
        Ok(())
    }

    /// A sampler that draws by the chain.
    fn chain(&mut self, sampler: &Resource<GuestSampler>) -> Result<&mut GuestSampler, HostError> {
        let sampler = self.table.get_mut(sampler)?;
        match &sampler.settings.program {
            None => Ok(sampler),
            Some(_) => Err(invalid("sampler", "one that draws by a program", "one that draws by the chain")),
        }
    }

    /// What a sampler's program is given, with what keeps it alive.
    fn put_on(&mut self, sampler: &Resource<GuestSampler>) -> Result<(&mut PutOn, &mut Given), HostError> {
        let GuestSampler { settings, given } = self.table.get_mut(sampler)?;
        match &mut Arc::make_mut(settings).program {
            Some(put_on) => Ok((put_on, given)),
            None => Err(invalid("sampler", "one that draws by the chain", "one that draws by a program")),
        }
    }

    fn mask(
        &mut self,
        model: &Resource<GuestModel>,
        tokens: &[u32],
        listed: Listed,
    ) -> Result<Resource<GuestMask>, HostError> {
        let model = self.table.get(model)?.model.clone();
        check_tokens(&model, tokens)?;
        let vocab_size = model.limits().vocab_size;
        let (mut mask, allowed) = match listed {
            Listed::Allowed => (TokenMask::none(vocab_size), true),
            Listed::Forbidden => (TokenMask::all(vocab_size), false),
        };
        for &token in tokens {
            mask.set(token, allowed);
        }
        self.give_mask(mask, model)
    }

    fn give_mask(&mut self, mask: TokenMask, model: HeldModel) -> Result<Resource<GuestMask>, HostError> {
        // One bit for each token.
        let charge = HostCharge::new(&self.owner.account, mask.vocab_size().div_ceil(8) as u64)?;
        self.give(GuestMask { held: Arc::new(HeldMask { mask: Arc::new(mask), model, charge }) })
    }
}

/// What a list of tokens says about them.
enum Listed {
    Allowed,
    Forbidden,
}

fn check_n(what: &str, n: usize, max: usize) -> Result<(), HostError> {
    match n {
        n if n > max => Err(invalid(what, n, format!("at most {max}"))),
        _ => Ok(()),
    }
}

impl Host for GuestState {}

impl HostTokenMask for GuestState {
    fn allow(
        &mut self,
        model: Resource<GuestModel>,
        tokens: Vec<u32>,
    ) -> Result<Resource<GuestMask>, HostError> {
        self.mask(&model, &tokens, Listed::Allowed)
    }

    fn forbid(
        &mut self,
        model: Resource<GuestModel>,
        tokens: Vec<u32>,
    ) -> Result<Resource<GuestMask>, HostError> {
        self.mask(&model, &tokens, Listed::Forbidden)
    }

    fn from_bits(
        &mut self,
        model: Resource<GuestModel>,
        bits: Vec<u64>,
    ) -> Result<Resource<GuestMask>, HostError> {
        let model = self.table.get(&model)?.model.clone();
        let vocab_size = model.limits().vocab_size;
        let n_words = bits.len();
        let mask = TokenMask::from_words(bits, vocab_size).ok_or_else(|| {
            let expected = format!("{}, for {vocab_size} tokens", vocab_size.div_ceil(64));
            invalid("bits", format!("{n_words} words"), expected)
        })?;
        self.give_mask(mask, model)
    }

    fn drop(&mut self, mask: Resource<GuestMask>) -> wasmtime::Result<()> {
        self.table.delete(mask)?;
        Ok(())
    }
}

impl HostSampler for GuestState {
    fn new(&mut self, seed: u64) -> wasmtime::Result<Resource<GuestSampler>> {
        let settings = Arc::new(Sampler { seed, ..Sampler::greedy() });
        self.give_or_trap(GuestSampler { settings, given: Given::default() })
    }

    fn by_program(
        &mut self,
        program: Resource<GuestProgram>,
        seed: u64,
    ) -> Result<Resource<GuestSampler>, HostError> {
        let program = self.table.get(&program)?.clone();
        let put_on = PutOn::new(program.program.clone());
        let settings = Arc::new(Sampler { seed, program: Some(Box::new(put_on)), ..Sampler::greedy() });
        let given = Given { program: Some(program), ..Given::default() };
        self.give(GuestSampler { settings, given })
    }

    fn set_parameters(
        &mut self,
        sampler: Resource<GuestSampler>,
        parameters: Vec<f32>,
    ) -> Result<(), HostError> {
        check_n("parameters", parameters.len(), N_PARAMETERS_MAX)?;
        if let Some((idx, &value)) = parameters.iter().enumerate().find(|(_, value)| !value.is_finite()) {
            return Err(SamplerError::Parameter { idx, value }.into());
        }
        self.put_on(&sampler)?.0.parameters = parameters;
        Ok(())
    }

    fn set_program_masks(
        &mut self,
        sampler: Resource<GuestSampler>,
        masks: Vec<Resource<GuestMask>>,
    ) -> Result<(), HostError> {
        check_n("masks", masks.len(), N_HANDLES_MAX)?;
        let masks: Vec<_> = masks
            .iter()
            .map(|mask| Ok(self.table.get(mask)?.held.clone()))
            .collect::<Result<_, HostError>>()?;
        let (put_on, given) = self.put_on(&sampler)?;
        put_on.masks = masks.iter().map(|held| held.mask.clone()).collect();
        given.masks = masks;
        Ok(())
    }

    fn set_program_biases(
        &mut self,
        sampler: Resource<GuestSampler>,
        biases: Vec<Resource<GuestBias>>,
    ) -> Result<(), HostError> {
        check_n("biases", biases.len(), N_HANDLES_MAX)?;
        let biases: Vec<_> = biases
            .iter()
            .map(|bias| Ok(self.table.get(bias)?.held.clone()))
            .collect::<Result<_, HostError>>()?;
        let (put_on, given) = self.put_on(&sampler)?;
        put_on.biases = biases.iter().map(|held| held.bias.clone()).collect();
        given.biases = biases;
        Ok(())
    }

    fn set_constraint(
        &mut self,
        sampler: Resource<GuestSampler>,
        constraint: Option<Resource<GuestConstraint>>,
        begins: Beginning,
    ) -> Result<(), HostError> {
        self.constrain(&sampler, constraint, begins)
    }

    fn with_seed(
        &mut self,
        sampler: Resource<GuestSampler>,
        seed: u64,
    ) -> wasmtime::Result<Resource<GuestSampler>> {
        let mut copy = self.table.get(&sampler)?.clone();
        // Its settings are its own.
        let charge = copy.given.bias.as_ref().map(|charge| charge.again()).transpose();
        copy.given.bias = charge.map_err(GuestFault::HostBytes)?.map(Arc::new);
        Arc::make_mut(&mut copy.settings).seed = seed;
        self.give_or_trap(copy)
    }

    fn set_temperature(
        &mut self,
        sampler: Resource<GuestSampler>,
        temperature: f32,
    ) -> Result<(), HostError> {
        self.set(&sampler, |settings| settings.temperature = temperature)
    }

    fn set_top_k(&mut self, sampler: Resource<GuestSampler>, k: Option<u32>) -> Result<(), HostError> {
        self.set(&sampler, |settings| settings.top_k = k)
    }

    fn set_top_p(&mut self, sampler: Resource<GuestSampler>, p: Option<f32>) -> Result<(), HostError> {
        self.set(&sampler, |settings| settings.top_p = p)
    }

    fn set_min_p(&mut self, sampler: Resource<GuestSampler>, p: Option<f32>) -> Result<(), HostError> {
        self.set(&sampler, |settings| settings.min_p = p)
    }

    fn set_repetition_penalty(
        &mut self,
        sampler: Resource<GuestSampler>,
        penalty: f32,
    ) -> Result<(), HostError> {
        self.set(&sampler, |settings| settings.repetition_penalty = penalty)
    }

    fn set_frequency_penalty(
        &mut self,
        sampler: Resource<GuestSampler>,
        penalty: f32,
    ) -> Result<(), HostError> {
        self.set(&sampler, |settings| settings.frequency_penalty = penalty)
    }

    fn set_presence_penalty(
        &mut self,
        sampler: Resource<GuestSampler>,
        penalty: f32,
    ) -> Result<(), HostError> {
        self.set(&sampler, |settings| settings.presence_penalty = penalty)
    }

    fn set_penalty_last_n(
        &mut self,
        sampler: Resource<GuestSampler>,
        n: Option<u32>,
    ) -> Result<(), HostError> {
        self.set(&sampler, |settings| settings.penalty_last_n = n)
    }

    fn set_bias(&mut self, sampler: Resource<GuestSampler>, bias: Vec<(u32, f32)>) -> Result<(), HostError> {
        if bias.len() > N_BIAS_MAX {
            return Err(invalid("bias", bias.len(), format!("at most {N_BIAS_MAX} tokens")));
        }
        let n_bytes = size_of_val(&*bias) as u64;
        let charge = (n_bytes > 0).then(|| HostCharge::new(&self.owner.account, n_bytes)).transpose()?;
        self.set(&sampler, |settings| settings.bias.clone_from(&bias))?;
        self.chain(&sampler)?.given.bias = charge.map(Arc::new);
        Ok(())
    }

    fn set_mask(
        &mut self,
        sampler: Resource<GuestSampler>,
        mask: Option<Resource<GuestMask>>,
    ) -> Result<(), HostError> {
        let mask = mask.map(|mask| self.table.get(&mask).map(|mask| mask.held.clone())).transpose()?;
        let sampler = self.chain(&sampler)?;
        Arc::make_mut(&mut sampler.settings).mask = mask.as_ref().map(|held| held.mask.clone());
        sampler.given.mask = mask;
        Ok(())
    }

    fn drop(&mut self, sampler: Resource<GuestSampler>) -> wasmtime::Result<()> {
        self.table.delete(sampler)?;
        Ok(())
    }
}
