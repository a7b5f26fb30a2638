//! A conversation on a terminal.

use trellis_client::{Error, ErrorBody, ErrorCode, Program, StartOptions};

use super::ChatArgs;
use super::command::{self, Command, Input};
use super::conversation::{Conversation, Message, Role};
use super::editor::{Line, Prompt, SIGN};
use super::finding::Finding;
use super::partner::{Answered, Ending, Partner, Request, Silence};
use super::settings::Settings;
use super::store::{Store, StoreError};
use crate::bundled;
use crate::cli::connect::{Home, HomeArgs};
use crate::cli::error::CliError;
use crate::cli::interrupt::{Press, Presses};
use crate::cli::output::{Format, escaped, note, print_line, remark};
use crate::cli::progress::{ProgressDisplay, Unit};
use crate::cli::resolve;
use crate::cli::run;
use crate::cli::screen::Screen;

/// The guest that a program leads.
const GUEST: &str = "conversation";

/// Before the names under which contexts are kept, which all guests of a user share.
const CONTEXT_PREFIX: &str = "chat/";

/// Leads a conversation until the user ends it.
///
/// # Errors
/// The guest cannot be built or run, the terminal cannot be read, or its end was asked for from outside.
pub(super) async fn talk(args: ChatArgs) -> Result<(), CliError> {
    let mut presses = Presses::watch()?;
    let named = resolve::resolve(GUEST, &resolve::example_folders())?;
    let (home, program) = presses
        .stop(async {
            let program = run::program(&named, Format::Text).await?;
            Ok((run::home(&args.home, &named, &mut args.home.patience(Format::Text)).await?, program))
        })
        .await?;
    let store = Store::of_user();
    let history = match store.as_ref().map(Store::history) {
        Ok(Ok(path)) => Some(path),
        Ok(Err(error)) => say_not_kept(&error),
        Err(error) => say_not_kept(error),
    };
    let mut prompt = Prompt::start(history)?;
    let settings = Settings::new(args.temperature, args.max_tokens);
    let mut talk = Talk {
        model: home.model.clone(),
        home,
        args: args.home,
        program,
        seed: args.seed,
        is_verbose: args.verbose,
        store,
        settings,
        conversation: Conversation { system: args.system, ..Conversation::default() },
        name: None,
        partner: None,
        screen: Screen::new(Format::Text),
        presses,
    };
    talk.begin().await?;
    talk.run(&mut prompt).await
}

fn say_not_kept<T>(error: &StoreError) -> Option<T> {
    note(Format::Text, &format!("what is written is not kept: {error}"));
    None
}

/// Whether the conversation goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    GoOn,
    End,
}

struct Talk {
    home: Home,
    args: HomeArgs,
    program: Program,
    /// The model that was asked for by its name.
    model: Option<String>,
    seed: Option<u64>,
    is_verbose: bool,
    store: Result<Store, StoreError>,
    settings: Settings,
    conversation: Conversation,
    /// Under which the conversation is kept.
    name: Option<String>,
    /// None where the next message starts one, and tells it the conversation.
    partner: Option<Partner>,
    screen: Screen,
    presses: Presses,
}

impl Talk {
    /// Starts the first guest, so that what is wrong with it is said before something is written.
    async fn begin(&mut self) -> Result<(), CliError> {
        let mut partner = self.start(self.model.clone()).await.map_err(as_error)?;
        note(Format::Text, &format!("{} answers; /help lists the commands, Ctrl-D ends", partner.model));
        let Self { conversation, screen, presses, .. } = self;
        partner.tell(conversation, screen, presses).await.map_err(as_error)?;
        self.partner = Some(partner);
        Ok(())
    }

    async fn run(&mut self, prompt: &mut Prompt) -> Result<(), CliError> {
        loop {
            if self.presses.has_ended() {
                return Err(CliError::Interrupted);
            }
            prompt.show().await;
            let mut is_interrupted = false;
            let line = loop {
                tokio::select! {
                    biased;
                    press = self.presses.next() => match press {
                        // One from before the prompt was for an answer that had ended.
                        Press::Interrupt => is_interrupted |= prompt.is_edited(),
                        Press::End => {
                            prompt.withdraw().await;
                            return Err(CliError::Interrupted);
                        }
                    },
                    line = prompt.line() => break line,
                }
            };
            let next = match line {
                // Pressed behind the line, before anything came of it.
                Line::Text(_) if is_interrupted => Next::GoOn,
                Line::Text(text) => match command::read(&text) {
                    Ok(Input::Nothing) => Next::GoOn,
                    Ok(Input::Message(text)) => self.answer(&text).await?,
                    Ok(Input::Command(command)) => self.carry_out(command).await?,
                    Err(mistake) => said_wrong(&mistake),
                },
                Line::Interrupted => Next::GoOn,
                Line::End => Next::End,
                Line::Failed(error) => {
                    let source = std::io::Error::other(error.to_string());
                    return Err(CliError::Io { doing: "read the terminal".to_owned(), source });
                }
            };
            if next == Next::End {
                return Ok(());
            }
        }
    }

    /// Starts a guest on a model. Where the daemon has gone or is about to, in the next one.
    async fn start(&mut self, model: Option<String>) -> Result<Partner, Silence> {
        let options =
            StartOptions { model, seed: self.seed, label: Some(GUEST.to_owned()), ..StartOptions::default() };
        let mut finding = Finding::new(&self.args);
        loop {
            let Self { home, program, screen, presses, .. } = self;
            let started = Partner::start(&home.client, program.clone(), options.clone(), screen, presses);
            match started.await {
                Err(Silence::Lost(error)) if !home.is_inside() => {
                    *home = presses.stop(finding.after(&self.args, error)).await?;
                }
                started => return started,
            }
        }
    }

    /// A guest that knows the conversation, and whether it was there already.
    async fn partner(&mut self) -> Result<(Partner, bool), Silence> {
        if let Some(partner) = self.partner.take() {
            return Ok((partner, true));
        }
        let mut partner = self.start(self.model.clone()).await?;
        let Self { conversation, screen, presses, name, .. } = self;
        partner.tell(conversation, screen, presses).await?;
        if let Some(name) = name {
            let context = format!("{CONTEXT_PREFIX}{name}");
            match partner.done(&Request::Open(&context), screen, presses).await {
                // Without it the model reads all again.
                Ok(_) | Err(Silence::Refused(_)) => {}
                Err(silence) => return Err(silence),
            }
        }
        Ok((partner, false))
    }

    /// Has the model answer a message. What was said when an answer is cut short stays said.
    async fn answer(&mut self, message: &str) -> Result<Next, CliError> {
        let mut text = String::new();
        if let Some(partner) = &mut self.partner {
            partner.forget_press();
        }
        let outcome = loop {
            let (partner, was_there) = match self.partner().await {
                Ok(there) => there,
                Err(silence) => break Err(silence),
            };
            match self.ask(partner, message, &mut text).await {
                // It may have ended long ago, by its time or with its daemon. The next one knows as much.
                Err(Silence::Lost(error)) if was_there && text.is_empty() && !is_refusal(&error) => {
                    note(Format::Text, &format!("a new guest goes on with the conversation ({error})"));
                }
                outcome => break outcome,
            }
        };
        self.screen.end_text()?;
        if !text.is_empty() || outcome.is_ok() {
            self.conversation.push(Role::User, message);
            self.conversation.push(Role::Assistant, &text);
        }
        match outcome {
            Ok(answered) => self.say_how(&answered),
            Err(Silence::Dismissed) => note(Format::Text, "given up; a new guest goes on"),
            Err(silence) => return broken(silence),
        }
        Ok(Next::GoOn)
    }

    /// A guest that could not answer is not asked again: it has heard what is not part of the conversation.
    async fn ask(
        &mut self,
        mut partner: Partner,
        message: &str,
        text: &mut String,
    ) -> Result<Answered, Silence> {
        let Self { screen, presses, settings, .. } = self;
        let said = Message { role: Role::User, content: message.to_owned() };
        partner.done(&Request::Message(said), screen, presses).await?;
        let answered = partner.answer(settings, screen, presses, text).await?;
        self.partner = Some(partner);
        Ok(answered)
    }

    /// What is to be said of an answer beside the answer.
    fn say_how(&self, answered: &Answered) {
        match answered.ending {
            Ending::Complete => {}
            Ending::Full => {
                let n = answered.n_tokens;
                note(Format::Text, &format!("cut at {n} tokens; /set max_tokens N allows more"));
            }
            Ending::Stopped => note(Format::Text, "stopped; what was said so far stays said"),
        }
        if answered.n_forgotten > 0 {
            let n = answered.n_forgotten;
            note(Format::Text, &format!("the context is full: the oldest {n} messages are no longer seen"));
        }
        if self.is_verbose {
            note(Format::Text, &answered.cost());
        }
    }

    async fn carry_out(&mut self, command: Command) -> Result<Next, CliError> {
        match command {
            Command::Help => show(&command::help())?,
            Command::Clear => {
                self.conversation.messages.clear();
                self.name = None;
                return self.tell_anew().await;
            }
            Command::System(None) => match &self.conversation.system {
                Some(system) => show(system)?,
                None => show("there is no system message")?,
            },
            Command::System(Some(text)) => {
                self.conversation.system = Some(text);
                return self.tell_anew().await;
            }
            Command::Set(None) => show(&self.settings.list())?,
            Command::Set(Some((name, value))) => {
                if let Err(error) = self.settings.set(&name, &value) {
                    return Ok(said_wrong(&error));
                }
            }
            Command::Save(name) => match name.or_else(|| self.name.clone()) {
                Some(name) => return self.save(name).await,
                None => remark("error: /save needs a name, as in /save sums"),
            },
            Command::Load(None) => self.list_kept()?,
            Command::Load(Some(name)) => return self.load(name).await,
            Command::Model(None) => return self.list_models().await,
            Command::Model(Some(name)) => return self.change_model(name).await,
            Command::Bye => return Ok(Next::End),
        }
        Ok(Next::GoOn)
    }

    /// Tells the guest the conversation, which is another than it was.
    async fn tell_anew(&mut self) -> Result<Next, CliError> {
        let Some(mut partner) = self.partner.take() else { return Ok(Next::GoOn) };
        let Self { conversation, screen, presses, .. } = self;
        match partner.tell(conversation, screen, presses).await {
            Ok(()) => self.partner = Some(partner),
            Err(Silence::End) => return Err(CliError::Interrupted),
            // The next message starts another one.
            Err(_) => {}
        }
        Ok(Next::GoOn)
    }

    /// A request to the guest that is there, about what it has computed: how many tokens, or why not. None where that is lost, which is
    /// made up for by computing it again.
    async fn ask_there(&mut self, request: &Request<'_>) -> Result<Option<Result<u64, String>>, CliError> {
        let Some(mut partner) = self.partner.take() else { return Ok(None) };
        let Self { screen, presses, .. } = self;
        let done = match partner.done(request, screen, presses).await {
            Ok(n_tokens) => Ok(n_tokens),
            Err(Silence::Refused(why)) => Err(why),
            Err(Silence::End) => return Err(CliError::Interrupted),
            Err(_) => return Ok(None),
        };
        self.partner = Some(partner);
        Ok(Some(done))
    }

    async fn save(&mut self, name: String) -> Result<Next, CliError> {
        if let Some(partner) = &self.partner {
            self.conversation.model.clone_from(&partner.model);
        }
        let saved = match &self.store {
            Ok(store) => store.save(&name, &self.conversation),
            Err(error) => return Ok(said_wrong(error)),
        };
        if let Err(error) = saved {
            return Ok(said_wrong(&error));
        }
        let context = format!("{CONTEXT_PREFIX}{name}");
        let n_messages = self.conversation.messages.len();
        let kept = match self.ask_there(&Request::Save(&context)).await? {
            Some(Ok(n_tokens)) if n_tokens > 0 => format!(", and {n_tokens} tokens as they are computed"),
            Some(Err(why)) => format!("; what is computed is not kept: {why}"),
            _ => String::new(),
        };
        note(Format::Text, &format!("kept {n_messages} messages as {name}{kept}"));
        self.name = Some(name);
        Ok(Next::GoOn)
    }

    async fn load(&mut self, name: String) -> Result<Next, CliError> {
        let loaded = match &self.store {
            Ok(store) => store.load(&name),
            Err(error) => return Ok(said_wrong(error)),
        };
        match loaded {
            Ok(conversation) => self.conversation = conversation,
            Err(error) => return Ok(said_wrong(&error)),
        }
        let shown = self.conversation.shown(SIGN);
        if !shown.is_empty() {
            show(&shown)?;
        }
        if let Next::End = self.tell_anew().await? {
            return Ok(Next::End);
        }
        let context = format!("{CONTEXT_PREFIX}{name}");
        let computed = match self.ask_there(&Request::Open(&context)).await? {
            Some(Ok(n_tokens)) if n_tokens > 0 => format!("{n_tokens} tokens of it are computed already"),
            _ => "the model reads it again with the next message".to_owned(),
        };
        let n_messages = self.conversation.messages.len();
        note(Format::Text, &format!("{n_messages} messages; {computed}"));
        self.name = Some(name);
        Ok(Next::GoOn)
    }

    fn list_kept(&self) -> Result<(), CliError> {
        match &self.store {
            Ok(store) if store.names().is_empty() => {
                show("no conversation is kept; /save NAME keeps this one")
            }
            Ok(store) => show(&store.names().join("\n")),
            Err(error) => {
                said_wrong(error);
                Ok(())
            }
        }
    }

    async fn list_models(&mut self) -> Result<Next, CliError> {
        let mut finding = Finding::new(&self.args);
        let models = loop {
            let Self { home, args, presses, .. } = self;
            match presses.stop(async { Ok(home.client.models().await?) }).await {
                Ok(models) => break models,
                Err(error) => match presses.stop(finding.after(args, error)).await {
                    Ok(found) => *home = found,
                    Err(error) => return Ok(said_wrong(&error)),
                },
            }
        };
        let own = self.partner.as_ref().map(|partner| partner.model.as_str());
        let lines = models.iter().map(|model| {
            let sign = if own == Some(model.name.as_str()) { '*' } else { ' ' };
            format!("{sign} {}\n", model.name)
        });
        show(&lines.collect::<String>())?;
        Ok(Next::GoOn)
    }

    /// Goes on with another model, which is told what was said. If that is not to be had, with the one that was there.
    async fn change_model(&mut self, name: String) -> Result<Next, CliError> {
        let mut started = self.start(Some(name.clone())).await;
        if let Err(Silence::Lost(error)) = &started
            && is_unknown_model(error)
            && self.home.is_inside()
            && bundled::NAMES.contains(&name.as_str())
        {
            if let Err(error) = self.load_inside(&name).await {
                return Ok(said_wrong(&error));
            }
            started = self.start(Some(name.clone())).await;
        }
        let told = match started {
            Ok(mut partner) => {
                let Self { conversation, screen, presses, .. } = self;
                partner.tell(conversation, screen, presses).await.map(|()| partner)
            }
            Err(silence) => Err(silence),
        };
        match told {
            Ok(partner) => {
                note(Format::Text, &format!("{} answers from now on", partner.model));
                self.model = Some(name);
                self.partner = Some(partner);
                Ok(Next::GoOn)
            }
            Err(Silence::Dismissed) => Ok(Next::GoOn),
            Err(silence) => broken(silence),
        }
    }

    /// Loads a model into the daemon of this process, which has no other users.
    async fn load_inside(&mut self, name: &str) -> Result<(), CliError> {
        let progress = ProgressDisplay::new(Format::Text);
        let title = format!("loading {name}");
        let loading = self.home.client.load_model(name, None, |done, total| {
            progress.update(&title, Unit::Bytes, done, total);
        });
        self.presses.stop(async { Ok(loading.await?) }).await?;
        Ok(())
    }
}

/// Shows text of several lines, without what a terminal obeys.
fn show(text: &str) -> Result<(), CliError> {
    print_line(&escaped(text.trim_end_matches('\n')))
}

fn said_wrong(error: &impl std::fmt::Display) -> Next {
    remark(&format!("error: {error}"));
    Next::GoOn
}

/// What keeps a guest from going on does not end the conversation, unless its end was asked for or the screen is gone.
fn broken(silence: Silence) -> Result<Next, CliError> {
    match silence {
        Silence::Dismissed => Ok(Next::GoOn),
        Silence::End => Err(CliError::Interrupted),
        Silence::Refused(why) => Ok(said_wrong(&why)),
        Silence::Lost(error @ CliError::OutputClosed) => Err(error),
        Silence::Lost(CliError::Interrupted) => Ok(Next::GoOn),
        Silence::Lost(error) => {
            error.print(Format::Text);
            Ok(Next::GoOn)
        }
    }
}

/// Before there is a conversation.
fn as_error(silence: Silence) -> CliError {
    match silence {
        Silence::Lost(error) => error,
        Silence::Refused(why) => CliError::Guest(Box::new(ErrorBody::new(ErrorCode::GuestFailed, why))),
        Silence::Dismissed | Silence::End => CliError::Interrupted,
    }
}

/// Whether the daemon has refused what was asked, as it would again.
fn is_refusal(error: &CliError) -> bool {
    match error {
        CliError::OutputClosed => true,
        CliError::Client(error @ Error::Daemon(_)) => !error.is_retryable(),
        CliError::Client(Error::Request(_)) => true,
        _ => false,
    }
}

fn is_unknown_model(error: &CliError) -> bool {
    match error {
        CliError::Guest(body) => body.code == ErrorCode::UnknownModel,
        CliError::Client(error) => error.code() == Some(&ErrorCode::UnknownModel),
        _ => false,
    }
}
