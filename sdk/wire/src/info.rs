use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::limit::GuestAmounts;

/// A loaded model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelInfo {
    /// The name that guests ask for.
    pub name: String,
    /// Its architecture, as its `config.json` names it.
    pub architecture: String,
    /// Entries of its vocabulary.
    pub n_vocab: u64,
    /// Positions of its longest context.
    pub n_positions: u64,
    /// Its parameters.
    pub n_parameters: u64,
    /// Bytes of its weights on the device.
    pub weight_bytes: u64,
    /// The type of its weights on the device.
    pub dtype: String,
    /// The device that runs it.
    pub device: String,
    /// What it is doing, in a word: `loaded`, `draining` while it is unloaded and its guests come to their ends, `failed`; of one that
    /// is loaded on demand also `unloaded`, `loading`.
    pub state: String,
    /// Whether it is loaded when a guest asks for it.
    pub is_on_demand: bool,
    /// Whether it stays loaded once it is, whatever else is asked for. An older daemon does not say.
    pub is_pinned: bool,
    /// Other names under which guests find it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// Bytes of it that are loaded, and bytes in all, while it is being loaded; 0 for what is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loading_bytes: Option<(u64, u64)>,
    /// Milliseconds since a guest had anything of it, of one that is loaded on demand, and is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unused_ms: Option<u64>,
    /// The folder that it was loaded from, as far as the actor may know; absent for a bundled one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder: Option<String>,
    /// Guests that name no model get this one.
    pub is_default: bool,
    /// KV pages that it has now; they change when other models come and go.
    pub n_pages: u64,
    /// KV pages that nothing holds.
    pub n_pages_free: u64,
    /// Bytes of a KV page.
    pub page_bytes: u64,
    /// Open contexts.
    pub n_contexts: u64,
    /// What was computed since it was loaded.
    #[serde(flatten)]
    pub computed: Computed,
    /// Milliseconds that the device has computed for it.
    pub busy_ms: u64,
    /// Why nothing more is computed for it; absent while it works.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Whether there is room for a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FitInfo {
    /// Its name.
    pub model: String,
    /// Whether a load would come to its end at once: now, or once what is named in `evicts` is unloaded, which it does by itself.
    pub fits: bool,
    /// Whether it is loaded.
    pub is_loaded: bool,
    /// The device that it would run on.
    pub device: String,
    /// All that it needs at least.
    pub needed_bytes: u64,
    /// Of which its weights.
    pub weight_bytes: u64,
    /// Of which memory for steps.
    pub step_bytes: u64,
    /// Of which KV, for one context of the longest.
    pub kv_bytes: u64,
    /// Positions of its longest context, which is shorter than the model's where there is no room for that.
    pub n_positions: u64,
    /// What other models do not need of the device.
    pub free_bytes: u64,
    /// What all models may take of the device together.
    pub capacity_bytes: u64,
    /// Models that nobody uses, and that would be unloaded.
    pub evicts: Vec<String>,
    /// Whether it would fit later: once models come free that would make room.
    pub fits_later: bool,
    /// Those of them that guests use.
    pub used: Vec<String>,
}

/// A running guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestInfo {
    /// Its number, never given twice by one daemon.
    pub guest_id: u64,
    /// The connection that started it; of a detached guest a number of its own, among theirs.
    pub session_id: u64,
    /// The user that it belongs to.
    pub uid: u32,
    /// The class of that user; an older daemon does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// The name of its program; of a component what its client calls it, if it does, and the beginning of its hash.
    pub program: String,
    /// What it is doing, in a word.
    pub state: String,
    /// The models that it holds something of: a handle, a context, or whatever else was made with them.
    pub models: Vec<String>,
    /// Its open contexts.
    pub n_contexts: u64,
    /// KV pages that its contexts hold.
    pub n_pages: u64,
    /// Those of them that made room for others and are in host memory.
    pub n_pages_on_host: u64,
    /// Bytes of its linear memory.
    pub memory_bytes: u64,
    /// Milliseconds since it started.
    pub elapsed_ms: u64,
    /// Tokens of its prompts that are being computed; 0 where none is, or where an older daemon does not say.
    pub n_prompt_tokens: u64,
    /// Those of them that are left.
    pub n_prompt_tokens_left: u64,
    /// Whether it goes on without the connection that started it.
    #[serde(skip_serializing_if = "is_false")]
    pub is_detached: bool,
    /// Whether a client reads it, where it is detached.
    #[serde(skip_serializing_if = "is_false")]
    pub is_attached: bool,
    /// What it has used so far: its tokens and its time. What it has sent is known at its end.
    pub usage: GuestUsage,
    /// What it uses of what it is bounded in; an older daemon does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<GuestAmounts>,
    /// The most that it may use, within what its session and its user may; an older daemon does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<GuestAmounts>,
}

/// What a guest has used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestUsage {
    /// Tokens computed for it, those decoded ahead in vain included.
    pub n_tokens: u64,
    /// Tokens decoded ahead of a stream and then forgotten, or guessed wrongly.
    pub n_tokens_in_vain: u64,
    /// Tokens of prompts that the prefix cache already held; not part of `n_tokens`.
    pub n_tokens_cached: u64,
    /// Tokens that were guessed for it, by a draft model for one, and verified.
    pub n_tokens_guessed: u64,
    /// Those of them that were right.
    pub n_tokens_guessed_right: u64,
    /// Tokens of saved contexts that it opened whose KV came back from disk; not part of `n_tokens`. An older daemon does not
    /// say.
    pub n_tokens_reopened: u64,
    /// Bytes of that KV.
    pub reopened_bytes: u64,
    /// Microseconds from when it opened such contexts until they were there, summed over them.
    pub reopened_us: u64,
    /// Steps of devices that went by while a context of it could have been in them, summed over contexts: others were
    /// served, it stood in line for KV pages, or it had no mask.
    pub n_steps_waited: u64,
    /// What was in vain and what it waited for, by cause.
    #[serde(flatten)]
    pub causes: Causes,
    /// Bytes of its output that the client was sent, as credit counts them.
    pub output_bytes: u64,
    /// Microseconds from its start to its end.
    pub elapsed_us: u64,
}

/// A device in use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceInfo {
    /// As the settings name it: `cpu`, `cuda`, `cuda:1`.
    pub name: String,
    /// The models on it, those on their way out included.
    pub models: Vec<String>,
    /// Milliseconds since it was opened.
    pub open_ms: u64,
    /// Milliseconds of those in which it computed, for models that are gone as well. In the rest it was idle.
    pub busy_ms: u64,
    /// Steps computed for the models on it, from the load of each on.
    pub n_steps: u64,
    /// Rows of those steps.
    pub n_rows: u64,
    /// Tokens computed in them.
    pub n_tokens: u64,
    /// Contexts that its last steps had no room for, or no KV pages, and that wait for the next; an older daemon does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_contexts_waiting: Option<u64>,
    /// Bytes that models may take of it; absent where that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Bytes that they use: their weights, and KV pages that something holds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes_used: Option<u64>,
}

/// A model that is being loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoadingInfo {
    /// The name that guests will ask for.
    pub model: String,
    /// Bytes of its weights that are on the device.
    pub done_bytes: u64,
    /// Bytes in all; 0 as long as that is not known.
    pub total_bytes: u64,
}

/// Something that went wrong in the daemon, and not in a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FailureInfo {
    /// What, and why.
    pub message: String,
    /// Milliseconds since.
    pub ago_ms: u64,
}

/// What was computed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Computed {
    /// Steps.
    pub n_steps: u64,
    /// Rows of those steps.
    pub n_rows: u64,
    /// Rows computed in vain: their work ended while they were under way.
    pub n_rows_in_vain: u64,
    /// Tokens computed.
    pub n_tokens: u64,
    /// Tokens of prompts that the prefix cache already held.
    pub n_tokens_cached: u64,
    /// Tokens decoded ahead, or guessed, in vain.
    pub n_tokens_in_vain: u64,
    /// Tokens computed again, after their KV had been given up for want of pages.
    pub n_tokens_again: u64,
    /// What was in vain and what was waited for, by cause.
    #[serde(flatten)]
    pub causes: Causes,
}

/// What was computed in vain and what was waited for, by cause.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Causes {
    /// Rows in vain: their guest gave up what they were computed for while they were under way.
    pub n_rows_given_up: u64,
    /// Rows in vain: the draw before them was the last of its run, by a stop token for one.
    pub n_rows_past_end: u64,
    /// Rows in vain: of a step that failed, or under way for work that failed.
    pub n_rows_failed: u64,
    /// Rows that drew nothing because their masks had not come.
    pub n_rows_sat_out: u64,
    /// Tokens in vain: decoded ahead of a guest that did something else then.
    pub n_tokens_given_up: u64,
    /// Tokens in vain: guessed wrongly.
    pub n_tokens_guessed_wrong: u64,
    /// Steps of the device, those of other models included, that went by while a context could decode and had no row in
    /// them, summed over contexts.
    pub n_steps_waited_to_decode: u64,
    /// As above, while a context had a prompt to compute: steps had no room for it within their length.
    pub n_steps_waited_with_prompt: u64,
    /// As above, while a context stood in line for KV pages.
    pub n_steps_waited_for_pages: u64,
    /// As above, while a context had no mask for its next draw.
    pub n_steps_waited_for_masks: u64,
}

/// The daemon as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DaemonInfo {
    /// Name and version of the build.
    pub build: String,
    /// Its process.
    pub pid: u32,
    /// The devices that it computes on, as people know them.
    pub device: String,
    /// Each device that it computes on.
    pub devices: Vec<DeviceInfo>,
    /// Names of the loaded models.
    pub models: Vec<String>,
    /// Names of the registered programs.
    pub programs: Vec<String>,
    /// Milliseconds since it started.
    pub uptime_ms: u64,
    /// Bytes of its resident memory.
    pub resident_bytes: u64,
    /// Bytes of KV memory that models have. Pages differ in size from model to model: [`ModelInfo`] counts them.
    pub kv_bytes: u64,
    /// Bytes of it that nothing holds.
    pub kv_bytes_free: u64,
    /// What was computed since the daemon started, for models that are gone as well: these counters never shrink.
    pub computed: Computed,
    /// Running guests, of all users.
    pub n_guests: u64,
    /// Open connections; each detached guest counts as one more.
    pub n_sessions: u64,
    /// The class of the user that asks; an older daemon does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<ClassInfo>,
    /// What the user that asks may do: `run`, `upload`, `load`, `see_others`, `stop_others`, and `operate` for the operator; an
    /// older daemon does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permissions: Option<Vec<String>>,
    /// Where guests run: `thread` for threads of the daemon, `process` where those of each user have a process of their own; an
    /// older daemon does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isolation: Option<String>,
    /// With `process`: what the kernel enforces of the rules about files, ports and sockets (Landlock) that such a process has beside
    /// its filter of system calls: `enforced`, `partly-enforced`, `missing`. Absent where that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_rules: Option<String>,
    /// What it is doing, in a word: `ready`, `draining` while it takes on nothing more and what runs comes to its end, `failed`;
    /// an older daemon does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// Models that are being loaded.
    pub loading: Vec<LoadingInfo>,
    /// Why nothing can be computed: which device has failed, and of what; absent while all is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// The last load or device that failed since it started, also where all is well by now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<FailureInfo>,
    /// The operator's policy, between guests and their clients: its file and the beginning of its hash; absent where there is
    /// none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
}

/// A setting that a configuration has changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SettingChange {
    /// As in the file: `limits.cpu_ms` is `cpu_ms` in its table `[limits]`.
    pub name: String,
    /// The value before, as JSON; absent where nothing was set.
    pub before: Option<String>,
    /// The value after, likewise.
    pub after: Option<String>,
}

/// What has come of a configuration that was read again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReloadInfo {
    /// What holds from now on.
    pub changed: Vec<SettingChange>,
    /// What would hold if the daemon were started again.
    pub waiting: Vec<SettingChange>,
}

/// What is about to take a daemon's place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UpgradeInfo {
    /// The path of the program.
    pub program: String,
    /// What it says of its version.
    pub version: String,
    /// Guests, uploads and loads whose ends the daemon waits for.
    pub n_at_work: u64,
    /// How long it waits for them, in milliseconds; those that are left then end with [`crate::ErrorCode::ShuttingDown`].
    pub drain_ms: u64,
}

/// A class of users.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClassInfo {
    /// Its name; `default` is that of users who are in no other.
    pub name: String,
    /// How much of the devices and processors each of its users has, beside a user with a share of 1.
    pub share: u32,
    /// KV pages of users of a lower rank make room first.
    pub rank: u32,
    /// The most that each of its users may have, by name, of what is not as for each user of any class.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, u64>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
pub(crate) fn is_false(value: &bool) -> bool {
    !value
}
