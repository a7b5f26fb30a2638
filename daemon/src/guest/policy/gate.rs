//! What flows between one guest and its client, through the policy.

use std::sync::Arc;

use tokio::sync::{Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use trellis_engine::account::{Account, ActorId};

use super::PolicyFailure;
use super::bindings::trellis::host::policies as wit;
use super::instance::Instance;
use crate::guest::inbox::{InboxReceiver, InboxSender, inbox, message_charge};
use crate::guest::io::{
    GuestIo, GuestOutput, LogLevel, OutputReceiver, OutputRefused, OutputSender, output_channel,
};
use crate::guest::limits::GuestLimits;
use crate::guest::log::pieces;
use crate::guest::names::{REASON_BYTES_MAX, cut};
use crate::user_places::{UserPlace, UserPlaces};

/// A guest, as the policy is told of it.
pub(crate) use super::bindings::trellis::host::policies::GuestInfo as PolicedGuest;

/// Why a guest ends that the policy does not let go on.
#[derive(Debug)]
pub(crate) enum Ruling {
    /// The policy says so, with a reason for its client.
    Ended(String),
    /// The policy failed.
    Failed(PolicyFailure),
}

impl From<PolicyFailure> for Ruling {
    fn from(failure: PolicyFailure) -> Self {
        Self::Failed(failure)
    }
}

/// How a guest ended, as the policy is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Closed<'a> {
    /// The code of its error, unless it ended well.
    pub(crate) code: Option<&'a str>,
    /// What it used.
    pub(crate) n_tokens: u64,
    pub(crate) n_tokens_in_vain: u64,
    pub(crate) n_tokens_cached: u64,
    pub(crate) elapsed_us: u64,
}

/// The policy between one guest and its client.
pub(crate) struct Gate {
    instance: Mutex<Instance>,
    places: UserPlaces,
    about: PolicedGuest,
    /// Who pays for what goes through.
    account: Arc<Account>,
    piece_bytes: usize,
    whole_bytes: usize,
    in_flight_bytes: usize,
    inbox_bytes: usize,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").field("guest", &self.about.number).finish_non_exhaustive()
    }
}

impl Gate {
    pub(super) fn new(
        instance: Instance,
        places: UserPlaces,
        about: PolicedGuest,
        account: Arc<Account>,
        limits: &GuestLimits,
    ) -> Self {
        Self {
            instance: Mutex::new(instance),
            places,
            about,
            account,
            piece_bytes: limits.output_piece_bytes(),
            whole_bytes: limits.output_whole_bytes(),
            in_flight_bytes: limits.output_bytes_in_flight,
            inbox_bytes: limits.inbox_bytes,
        }
    }

    /// The instance, once it is this guest's turn and its user's.
    async fn turn(&self) -> (MutexGuard<'_, Instance>, UserPlace) {
        let instance = self.instance.lock().await;
        (instance, self.places.take(ActorId(self.about.uid)).await)
    }

    /// The guest's arguments, as the policy lets them through.
    pub(crate) async fn arguments(&self, arguments: Vec<String>) -> Result<Vec<String>, Ruling> {
        self.received(wit::Input::Arguments(arguments)).await
    }

    async fn received(&self, input: wit::Input) -> Result<Vec<String>, Ruling> {
        let (mut instance, _place) = self.turn().await;
        self.receive(&mut instance, input).await
    }

    async fn receive(&self, instance: &mut Instance, input: wit::Input) -> Result<Vec<String>, Ruling> {
        match instance.received(&self.about, &input).await? {
            wit::Ruling::Pass => Ok(match input {
                wit::Input::Arguments(arguments) => arguments,
                wit::Input::Message(text) => vec![text],
            }),
            wit::Ruling::Replace(texts) => Ok(texts),
            wit::Ruling::End(reason) => Err(Ruling::Ended(cut(&reason, REASON_BYTES_MAX))),
        }
    }

    /// What the client is told of the guest's error, of which this is the text; none where the policy keeps it back.
    pub(crate) async fn error(&self, text: String) -> Result<Option<String>, Ruling> {
        let outputs = self.verdict(wit::Output::Error(text)).await?;
        let mut texts = Vec::new();
        for output in outputs {
            let wit::Output::Error(text) = output else {
                let what = "something else in the place of an error";
                return Err(PolicyFailure::WrongKind { call: "emitted", what }.into());
            };
            texts.push(text);
        }
        Ok((!texts.is_empty()).then(|| texts.join("\n")))
    }

    async fn emitted(&self, output: GuestOutput) -> Result<Vec<GuestOutput>, Ruling> {
        let (output, level) = match output {
            GuestOutput::Text(text) => (wit::Output::Text(text), LogLevel::Info),
            GuestOutput::Tokens(tokens) => (wit::Output::Tokens(tokens), LogLevel::Info),
            GuestOutput::Json(json) => (wit::Output::Json(json), LogLevel::Info),
            GuestOutput::Log { level, line } => (wit::Output::Log(line), level),
            // What the host says of the guest; where the settings do not allow it, there is none.
            host @ (GuestOutput::Recorded(_) | GuestOutput::Profiled(_)) => return Ok(vec![host]),
        };
        self.outputs(self.verdict(output).await?, "emitted", level)
    }

    async fn verdict(&self, output: wit::Output) -> Result<Vec<wit::Output>, Ruling> {
        match self.turn().await.0.emitted(&self.about, &output).await? {
            wit::Verdict::Pass => Ok(vec![output]),
            wit::Verdict::Replace(outputs) => Ok(outputs),
            wit::Verdict::End(reason) => Err(Ruling::Ended(cut(&reason, REASON_BYTES_MAX))),
        }
    }

    /// What the policy lets through, in pieces that fit any credit.
    fn outputs(
        &self,
        outputs: Vec<wit::Output>,
        call: &'static str,
        level: LogLevel,
    ) -> Result<Vec<GuestOutput>, Ruling> {
        let mut passed = Vec::with_capacity(outputs.len());
        for output in outputs {
            match output {
                wit::Output::Text(text) => {
                    passed.extend(
                        pieces(&text, self.piece_bytes).map(|text| GuestOutput::Text(text.to_owned())),
                    );
                }
                wit::Output::Tokens(tokens) => {
                    let n_tokens = (self.piece_bytes / size_of::<u32>()).max(1);
                    passed.extend(tokens.chunks(n_tokens).map(|tokens| GuestOutput::Tokens(tokens.to_vec())));
                }
                wit::Output::Json(json) => {
                    if json.len() > self.whole_bytes {
                        let limit_bytes = self.whole_bytes as u64;
                        return Err(PolicyFailure::TooLarge { call, limit_bytes }.into());
                    }
                    if serde_json::from_str::<serde::de::IgnoredAny>(&json).is_err() {
                        let what = "a text that is no JSON in the place of one that is";
                        return Err(PolicyFailure::WrongKind { call, what }.into());
                    }
                    passed.push(GuestOutput::Json(json));
                }
                wit::Output::Log(line) => passed.extend(
                    pieces(&line, self.piece_bytes)
                        .map(|line| GuestOutput::Log { level, line: line.to_owned() }),
                ),
                wit::Output::Error(_) => {
                    let what = "an error where there is none";
                    return Err(PolicyFailure::WrongKind { call, what }.into());
                }
            }
        }
        Ok(passed)
    }

    /// Tells the policy that the guest has ended; returns what it still has for the client.
    pub(crate) async fn ended(&self, closed: Closed<'_>) -> Result<Vec<GuestOutput>, Ruling> {
        let used = wit::Used {
            tokens: closed.n_tokens,
            tokens_in_vain: closed.n_tokens_in_vain,
            tokens_cached: closed.n_tokens_cached,
            elapsed_us: closed.elapsed_us,
        };
        let outcome = match closed.code {
            None => wit::Outcome::Finished,
            Some(code) => wit::Outcome::Failed(code.to_owned()),
        };
        let outputs = self.turn().await.0.ended(&self.about, used, &outcome).await?;
        self.outputs(outputs, "ended", LogLevel::Info)
    }

    /// Stands between a guest and its client: what the guest is given in the place of this, and what passes on between both.
    pub(crate) fn between(self: &Arc<Self>, io: GuestIo) -> (GuestIo, Passage) {
        let (output, from_guest) = output_channel(self.in_flight_bytes);
        // One message waits here, the others where they wait for any guest.
        let (to_guest, input) = inbox(1, self.inbox_bytes);
        let to_client = io.output.paid_by(self.account.clone());
        let passage = Passage { gate: self.clone(), to_client, from_guest, from_client: io.input, to_guest };
        (GuestIo { output, input }, passage)
    }
}

/// What passes on between a guest and its client.
#[derive(Debug)]
pub(crate) struct Passage {
    gate: Arc<Gate>,
    to_client: OutputSender,
    from_guest: OutputReceiver,
    from_client: InboxReceiver,
    to_guest: InboxSender,
}

impl Passage {
    /// Passes on until the guest has ended and all that it sent is with its client. A ruling stops the guest, by `stop`; nothing
    /// goes on after it. Returns what is left: the way to the client.
    pub(crate) async fn pass_on(
        self,
        stop: impl Fn() + Clone + Send + 'static,
    ) -> (OutputSender, Option<Ruling>) {
        let Self { gate, to_client, from_guest, from_client, to_guest } = self;
        let (ruled, mut ruling) = tokio::sync::mpsc::channel(1);
        let over = CancellationToken::new();
        let (inward, of_inward, stop_inward) = (gate.clone(), ruled.clone(), stop.clone());
        let is_over = over.clone();
        let inward = AbortOnDropHandle::new(tokio::spawn(async move {
            if let Err(ruling) = inward.pass_in(from_client, to_guest, is_over).await {
                // There is room for one, and one is enough.
                let _ = of_inward.try_send(ruling);
                stop_inward();
            }
        }));
        if let Err(ruling) = gate.pass_out(from_guest, &to_client).await {
            let _ = ruled.try_send(ruling);
            stop();
        }
        // It holds the client's end of the inbox until it is gone. A call under way is bounded, and to give it up would spend
        // the instance.
        over.cancel();
        if let Err(error) = inward.await
            && error.is_panic()
        {
            std::panic::resume_unwind(error.into_panic());
        }
        (to_client, ruling.try_recv().ok())
    }
}

impl Gate {
    async fn pass_in(
        &self,
        mut from_client: InboxReceiver,
        to_guest: InboxSender,
        over: CancellationToken,
    ) -> Result<(), Ruling> {
        while let Some(Some(text)) = over.run_until_cancelled(from_client.recv()).await {
            // Once it has begun, the call goes on to its end.
            let Some((mut instance, place)) = over.run_until_cancelled(self.turn()).await else { break };
            let texts = self.receive(&mut instance, wit::Input::Message(text)).await?;
            drop((instance, place));
            for text in texts {
                let charge = message_charge(&self.account, &text)
                    .map_err(|exceeded| PolicyFailure::OverBudget { call: "received", exceeded })?;
                if !matches!(over.run_until_cancelled(to_guest.send(text, charge)).await, Some(Ok(()))) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    async fn pass_out(&self, mut from_guest: OutputReceiver, to_client: &OutputSender) -> Result<(), Ruling> {
        while let Some(output) = from_guest.recv().await {
            let n_bytes = output.credit_bytes();
            for output in self.emitted(output).await? {
                match to_client.send(output).await {
                    Ok(()) => {}
                    Err(OutputRefused::Closed) => return Ok(()),
                    Err(OutputRefused::OverBudget(exceeded)) => {
                        return Err(PolicyFailure::OverBudget { call: "emitted", exceeded }.into());
                    }
                }
            }
            from_guest.grant(n_bytes);
        }
        Ok(())
    }
}
