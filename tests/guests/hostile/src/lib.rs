//! The guest that the tests send against a daemon: its first argument says what it does.

mod attacks;
mod beams;
mod bounds;
mod generations;
mod helpers;
mod looks;
mod mistakes;
mod neighbour;
mod posterior;
mod script;
mod tour;
mod world;

use std::error::Error;

use trellis_guest::bindings::trellis::host::session::arguments;

trellis_guest::main!(run);

type Outcome = Result<(), Box<dyn Error>>;

fn run() -> Outcome {
    let arguments = arguments();
    let (mode, rest) = arguments.split_first().ok_or("a mode is needed")?;
    match mode.as_str() {
        "tokens" => neighbour::tokens(rest),
        "forks" => neighbour::forks(rest),
        "endless" => neighbour::endless(),
        "paced" => neighbour::paced(rest),
        "echo" => neighbour::echo(),
        "keep" => neighbour::keep(),
        "every-draw" => bounds::every_draw(rest),
        "argue" => helpers::argue(rest),
        "encode-messages" => neighbour::encode(),
        "puppet" => neighbour::puppet(rest),
        "visitor" => neighbour::visitor(rest),
        "forget-saved" => neighbour::forget_saved(rest),
        "mistakes" => mistakes::make_all(),
        "posterior" => posterior::posterior(rest),
        "heal" => helpers::heal(rest),
        "bias" => helpers::bias(),
        "limits" => helpers::limits(),
        "script" => script::script(rest),
        "say" => helpers::say(rest),
        "draw" => helpers::draw(),
        "think" => helpers::think(),
        "tour" => tour::call_everything(),
        "world" => world::look_around(),
        mode => attacks::attack(mode, rest),
    }
}
