//! Code of components that a process has.

use std::collections::VecDeque;
use std::sync::Arc;

use super::State;
use crate::guest::{GuestLimits, N_COPIES_OF_CODE};
use crate::isolation::message::ToGuests;
use crate::isolation::outgoing::Outgoing;

impl State {
    /// Sees to it that the process has the code of a component.
    pub(super) fn provide(
        &mut self,
        hash: [u8; 32],
        code: &Arc<[u8]>,
        limits: &GuestLimits,
        outgoing: &Outgoing,
    ) {
        if let Some(idx) = self.programs.iter().position(|(known, _)| *known == hash) {
            let known = self.programs.remove(idx).expect("it was found there");
            return self.programs.push_back(known);
        }
        self.programs.push_back((hash, code.len()));
        outgoing.put(ToGuests::Program { hash, code: code.clone() });
        let n_bytes = |programs: &VecDeque<(_, usize)>| {
            programs.iter().map(|(_, n_code_bytes)| N_COPIES_OF_CODE * n_code_bytes).sum::<usize>()
        };
        while self.programs.len() > 1
            && (self.programs.len() > limits.n_programs || n_bytes(&self.programs) > limits.program_bytes)
        {
            let (hash, _) = self.programs.pop_front().expect("more than one");
            outgoing.put(ToGuests::ForgetProgram { hash });
        }
    }
}
