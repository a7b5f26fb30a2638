//! The requests of a connection that run guests, read them and talk to them.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use trellis_engine::account::HostCharge;
use trellis_wire::{Attach, ErrorBody, ErrorCode, Program, Start};

use super::{Connection, Request, unsupported};
use crate::guest::{InboxReceiver, InboxSender, inbox, message_charge, shown_name};
use crate::service::{over_host_bytes, refused};
use crate::session::call;
use crate::session::control::Control;
use crate::session::detached;
use crate::session::service::{Service, StartRequest};
use crate::session::start::{self, Lane};

/// What a guest takes of host memory while it waits to start, beside what its client says of it.
const START_BYTES: usize = 12 << 10;

/// No file has a longer name, and each registered program is one.
const PROGRAM_NAME_BYTES_MAX: usize = 255;

/// A guest that may be asked for, before it is.
struct Asked {
    request: StartRequest,
    /// For what waits until the guest runs.
    charge: HostCharge,
    inbox: (InboxSender, InboxReceiver),
}

impl<S: Service> Connection<S> {
    pub(super) fn begin_start(&mut self, id: u64, start: Start) -> Result<(), ErrorBody> {
        let (credit_bytes, is_followed) = (start.credit_bytes, start.is_recorded || start.is_profiled);
        let Asked { request, charge, inbox: (inbox, messages) } = self.ask(start)?;
        let control = Arc::new(Control::with_credit(credit_bytes));
        let lane = self.lane(id, &control, credit_bytes, is_followed);
        self.requests.insert(id, Request::Guest { control, inbox: Some(inbox) });
        let guest = start::run(lane, self.sessions.clone(), request, charge, messages);
        self.work(id, guest);
        Ok(())
    }

    pub(super) fn begin_detached(&mut self, id: u64, start: Start) -> Result<(), ErrorBody> {
        if start.is_recorded || start.is_profiled {
            // Their last bytes come after the guest's stop, without a bound on what would have to be kept.
            let message = "a detached guest is neither recorded nor profiled";
            return Err(ErrorBody::new(ErrorCode::InvalidArgument, message));
        }
        let asked = self.ask(start)?;
        let control = Arc::new(Control::default());
        let lane = self.lane(id, &control, 0, false);
        self.requests.insert(id, Request::Running(control));
        let start = detached::Start { request: asked.request, charge: asked.charge, inbox: asked.inbox };
        let guest = detached::start(lane, self.sessions.clone(), start, self.shutdown.clone());
        self.work(id, guest);
        Ok(())
    }

    /// What a guest needs of its connection.
    fn lane(&self, id: u64, control: &Arc<Control>, credit_bytes: u64, is_followed: bool) -> Lane {
        Lane {
            id,
            outbox: self.outbox.clone(),
            control: control.clone(),
            credit_bytes: usize::try_from(credit_bytes).expect("within the limit"),
            is_followed,
            stop_timeout: self.sessions.limits().stop_time(),
        }
    }

    /// Checks what a client wants to run.
    fn ask(&self, start: Start) -> Result<Asked, ErrorBody> {
        let limits = &self.sessions.guest_limits;
        let program_bytes = check_program(&start.program)?;
        self.check_credit(start.credit_bytes)?;
        let argument_bytes = limits.check_arguments(&start.arguments).map_err(|error| refused(&error))?;
        let name_bytes = [&start.model, &start.label].into_iter().flatten().map(String::len).sum::<usize>();
        let n_bytes = (START_BYTES + argument_bytes + name_bytes + program_bytes) as u64;
        let charge =
            HostCharge::new(&self.account, n_bytes).map_err(|exceeded| over_host_bytes(&exceeded))?;
        let request = StartRequest {
            actor: self.actor,
            session_id: self.session_id,
            program: start.program,
            arguments: start.arguments,
            model: start.model,
            seed: start.seed,
            deadline: start.deadline_ms.map(Duration::from_millis),
            label: start.label,
            is_recorded: start.is_recorded,
            is_profiled: start.is_profiled,
        };
        Ok(Asked { request, charge, inbox: inbox(limits.n_messages, limits.inbox_bytes) })
    }

    fn check_credit(&self, credit_bytes: u64) -> Result<(), ErrorBody> {
        let limit = self.sessions.guest_limits.output_bytes_in_flight as u64;
        match credit_bytes <= limit {
            true => Ok(()),
            false => Err(ErrorBody::over_limit("credit bytes", credit_bytes, limit)),
        }
    }

    pub(super) fn begin_attached(&mut self, id: u64, attach: &Attach) -> Result<(), ErrorBody> {
        self.check_credit(attach.credit_bytes)?;
        let guest = self.sessions.detached.find(self.actor, attach.guest_id, attach.daemon)?;
        let (reading, from) = guest.attach(self.session_id, attach.from)?;
        let control = Arc::new(Control::with_credit(attach.credit_bytes));
        let daemon = self.sessions.detached.daemon();
        let line = detached::Line { id, outbox: self.outbox.clone(), control: control.clone(), daemon };
        self.requests.insert(id, Request::Attached { control, guest });
        let reader = detached::read(line, reading, from);
        // What the guest has sent is had before the daemon goes, as far as there is time.
        self.work(id, reader);
        Ok(())
    }

    pub(super) fn acknowledge(&self, guest_id: u64, until: u64) {
        // A guest that is forgotten needs none.
        if let Ok(guest) = self.sessions.detached.find(self.actor, guest_id, None) {
            guest.acknowledge(self.session_id, until);
        }
    }

    pub(super) fn begin_message(&mut self, id: u64, to: u64, text: String) -> Result<(), ErrorBody> {
        let limit = self.sessions.limits().message_bytes;
        if text.len() > limit {
            return Err(ErrorBody::over_limit("message bytes", text.len() as u64, limit as u64));
        }
        let inbox = match self.requests.get(&to) {
            Some(Request::Guest { inbox, .. }) => inbox.clone(),
            Some(Request::Attached { guest, .. }) if guest.has_ended() => {
                return Err(call::guest_gone().about("to").with_value(to));
            }
            Some(Request::Attached { guest, .. }) => guest.inbox(),
            _ => return Err(call::guest_gone().about("to").with_value(to)),
        };
        let Some(inbox) = inbox else {
            let error = ErrorBody::new(ErrorCode::InvalidArgument, "the messages to this guest were ended");
            return Err(error.about("to").with_value(to));
        };
        let n_bytes = text.len();
        let n_bytes_waiting = n_bytes + self.requests.values().map(Request::message_bytes).sum::<usize>();
        let limit = self.sessions.limits().waiting_message_bytes;
        if n_bytes_waiting > limit {
            let (n_bytes, limit) = (n_bytes_waiting as u64, limit as u64);
            return Err(ErrorBody::over_limit("waiting message bytes", n_bytes, limit));
        }
        let charge = message_charge(&self.account, &text).map_err(|exceeded| over_host_bytes(&exceeded))?;
        let control = Arc::new(Control::default());
        self.requests.insert(id, Request::Message { control: control.clone(), n_bytes });
        let delivery = call::deliver(control, inbox, text, charge);
        self.running.push(delivery.map(move |ending| (id, ending)).boxed());
        Ok(())
    }
}

/// Bytes of a program's name, unless the program is of an unknown kind, or cannot be registered under that name.
fn check_program(program: &Program) -> Result<usize, ErrorBody> {
    match program {
        Program::Component { .. } => Ok(0),
        Program::Named { name } if name.len() <= PROGRAM_NAME_BYTES_MAX => Ok(name.len()),
        Program::Named { name } => {
            let n_bytes = name.len();
            let name = shown_name(name);
            let message = format!("no program {name:?} is registered, nor any of a name of {n_bytes} bytes");
            Err(ErrorBody::new(ErrorCode::UnknownProgram, message).about("program").with_value(name))
        }
        Program::Unknown => Err(unsupported("program")),
    }
}
