use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

use futures_util::FutureExt as _;
use trellis_engine::account::{Account, ActorId, Budget, Resource, SessionId};
use trellis_engine::backend::PAGE_LEN;

use super::*;
use crate::classes::Classes;
use crate::config::Budgets;
use crate::directory::village::Village;
use crate::session::Actor;

const PAGE_BYTES: u64 = 1024;
const MIB: u64 = 1 << 20;

fn kind() -> ModelKind {
    ModelKind {
        model: "tiny".to_owned(),
        tokenizer: "words".to_owned(),
        identity: [7; 32],
        format: "cpu, f32".to_owned(),
        page_bytes: PAGE_BYTES,
    }
}

fn name(uid: u32, name: &str) -> SavedName {
    SavedName { actor: ActorId(uid), name: name.to_owned() }
}

/// A context of so many tokens, with the KV of all.
fn context(n_tokens: usize) -> SavedContext {
    let tokens: Vec<u32> = (0..n_tokens as u32).map(|token| token * 7 % 500).collect();
    let head = serde_json::json!({
        "tokens": tokens, "n_computed": n_tokens, "evictions": null, "steering": null,
    });
    let n_bytes = n_tokens.div_ceil(PAGE_LEN) * PAGE_BYTES as usize;
    let kv = (0..n_bytes).map(|idx| (idx * 31 % 251) as u8).collect();
    SavedContext { head: serde_json::from_value(head).expect("a head"), kv, charge: None }
}

fn account() -> Arc<Account> {
    Account::new("user", Budget::UNLIMITED, None)
}

/// A store and its folder, which goes with what is returned.
fn store(of_user: u64, of_all: u64) -> (Store, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("a folder");
    let store = Store::new(dir.path().join("state/contexts"), StoreLimits { of_user, of_all });
    (store, dir)
}

/// Says when a context was used last.
fn date(store: &Store, name: &SavedName, used_s: u64) {
    let file = fs::File::options().append(true).open(store.path("tiny", name)).expect("a file");
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(used_s)).expect("dated");
}

#[test]
fn a_user_of_a_class_has_what_that_says_and_another_what_each_has() {
    let n_bytes = {
        let (store, _dir) = store(MIB, MIB);
        store.put(&kind(), &name(7, "a"), &context(100)).expect("kept")
    };
    let (store, _dir) = store(n_bytes, 8 * n_bytes);
    let of_class = format!("[lab]\nusers = [7]\n[lab.limits]\nsaved_disk_bytes = {}", 3 * n_bytes);
    let classes = Classes::of(&toml::from_str(&of_class).expect("valid")).expect("there are no names in it");
    let budgets = Budgets::default();
    let accounts = Accounts::with_classes(&budgets, budgets.host_bytes(1 << 30, u64::MAX), classes);
    store.set_accounts(&accounts);
    let class_of = |uid| accounts.class_of(Actor { uid, gid: 1 }).now_or_never().expect("it is at hand");
    let n_kept = |uid, n_saved: u64| {
        for idx in 0..n_saved {
            store.put(&kind(), &name(uid, &idx.to_string()), &context(100)).expect("kept");
        }
        store.n_bytes(Some(ActorId(uid))) / n_bytes
    };
    for uid in [7, 8] {
        accounts.begin_session(ActorId(uid), SessionId(uid.into()), class_of(uid));
    }
    assert_eq!([n_kept(7, 5), n_kept(8, 5)], [3, 1]);
    // What holds for all users together bounds a class as well.
    let more = of_class.replace(&(3 * n_bytes).to_string(), &(99 * n_bytes).to_string());
    accounts.set_classes(Classes::of(&toml::from_str(&more).expect("valid")).expect("as before"));
    accounts.end_session(SessionId(7));
    accounts.begin_session(ActorId(7), SessionId(9), class_of(7));
    assert_eq!(n_kept(7, 10), 7, "all but what another has");
}

/// A store that has room for five files, for one of each user, and for three of people of the village's lab; its accounts, its folder,
/// and the bytes of a file.
fn store_of_village() -> (Store, Arc<Accounts>, tempfile::TempDir, u64) {
    let n_bytes = {
        let (store, _dir) = store(MIB, MIB);
        store.put(&kind(), &name(1, "a"), &context(100)).expect("kept")
    };
    let of_class = format!("[lab]\ngroups = ['lab']\n[lab.limits]\nsaved_disk_bytes = {}", 3 * n_bytes);
    let settings = toml::from_str(&of_class).expect("valid");
    let classes = Classes::in_directory(&settings, Arc::new(Village)).expect("the lab is known");
    let budgets = Budgets::default();
    let accounts = Accounts::with_classes(&budgets, budgets.host_bytes(1 << 30, u64::MAX), classes);
    let (store, dir) = store(n_bytes, 5 * n_bytes);
    store.set_accounts(&accounts);
    (store, accounts, dir, n_bytes)
}

/// Has a user save so many files, in a session.
async fn saves(store: &Store, accounts: &Arc<Accounts>, uid: u32, n_files: u64) {
    let class = accounts.class_of(Actor { uid, gid: 1 }).await;
    accounts.begin_session(ActorId(uid), SessionId(uid.into()), class);
    for idx in 0..n_files {
        store.put(&kind(), &name(uid, &idx.to_string()), &context(100)).expect("kept");
    }
}

/// How many files of a user stay of eight.
async fn n_kept_in_village(uid: u32) -> u64 {
    let (store, accounts, _dir, n_bytes) = store_of_village();
    saves(&store, &accounts, uid, 8).await;
    store.n_bytes(Some(ActorId(uid))) / n_bytes
}

#[tokio::test]
async fn nothing_is_removed_by_the_limit_of_a_class_that_its_user_may_not_be_in() {
    assert_eq!([n_kept_in_village(1).await, n_kept_in_village(2).await], [3, 1]);
    // The directory does not say what this one is in: it has what holds for all users together.
    assert_eq!(n_kept_in_village(3).await, 5);
}

#[tokio::test]
async fn who_is_of_no_known_class_has_nothing_of_another_user_removed() {
    let (store, accounts, _dir, n_bytes) = store_of_village();
    saves(&store, &accounts, 1, 3).await;
    saves(&store, &accounts, 3, 8).await;
    let n_kept = |uid| store.n_bytes(Some(ActorId(uid))) / n_bytes;
    assert_eq!([n_kept(1), n_kept(3)], [3, 2]);
}

#[tokio::test]
async fn what_is_kept_last_is_bounded_by_its_users_class_as_well() {
    let (store, accounts, _dir, n_bytes) = store_of_village();
    saves(&store, &accounts, 1, 4).await;
    // The daemon is at its end.
    drop(accounts);
    for idx in 4..8 {
        store.put(&kind(), &name(1, &idx.to_string()), &context(100)).expect("kept");
    }
    assert_eq!(store.n_bytes(Some(ActorId(1))) / n_bytes, 3);
}

#[test]
fn what_is_kept_comes_back_to_the_byte_and_is_paid_for_while_it_is_held() {
    let (store, _dir) = store(MIB, MIB);
    let (name, account) = (name(7, "plans"), account());
    assert!(store.get(&kind(), &name, &account).is_none());
    for n_tokens in [0, 1, 16, 100] {
        let kept = context(n_tokens);
        let n_bytes = store.put(&kind(), &name, &kept).expect("kept");
        assert_eq!(store.n_bytes(Some(ActorId(7))), n_bytes, "one takes the place of the one before");
        let found = store.get(&kind(), &name, &account).expect("there");
        assert_eq!((&found.head, &found.kv), (&kept.head, &kept.kv));
        assert_eq!(account.used(Resource::HostBytes), found.kv.len() as u64);
        drop(found);
        assert_eq!(account.used(Resource::HostBytes), 0);
    }
    assert!(store.forget("tiny", &name).expect("removed"));
    assert!(!store.forget("tiny", &name).expect("nothing to remove"));
    assert!(store.get(&kind(), &name, &account).is_none());
    assert_eq!(store.n_bytes(None), 0);
}

#[test]
fn what_is_cut_short_or_changed_anywhere_is_none_and_is_removed() {
    let (store, _dir) = store(MIB, MIB);
    let (name, account) = (name(7, "plans"), account());
    let kept = context(40);
    store.put(&kind(), &name, &kept).expect("kept");
    let path = store.path("tiny", &name);
    let whole = fs::read(&path).expect("a file");
    let is_none = |bytes: &[u8], what: &str| {
        fs::write(&path, bytes).expect("written");
        assert!(store.get(&kind(), &name, &account).is_none(), "{what}");
        assert!(!path.exists(), "{what}: a broken file is removed");
    };
    for length in 0..whole.len() {
        is_none(&whole[..length], &format!("cut to {length} bytes"));
    }
    for idx in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[idx] ^= 1 << (idx % 8);
        is_none(&bytes, &format!("byte {idx} changed"));
    }
    is_none(&[&whole[..], &[0]].concat(), "longer");
    fs::write(&path, &whole).expect("written");
    assert!(store.get(&kind(), &name, &account).is_some_and(|found| found.kv == kept.kv));
    assert_eq!(account.used(Resource::HostBytes), 0);
}

#[test]
fn the_pages_of_another_model_are_left_where_they_are_and_its_tokens_are_not() {
    let (store, _dir) = store(MIB, MIB);
    let (name, account) = (name(7, "plans"), account());
    let kept = context(40);
    store.put(&kind(), &name, &kept).expect("kept");
    let other_weights = ModelKind { identity: [8; 32], ..kind() };
    let other_dtype = ModelKind { format: "cpu, f16".to_owned(), ..kind() };
    let other_pages = ModelKind { page_bytes: 2 * PAGE_BYTES, ..kind() };
    for other in [other_weights, other_dtype, other_pages] {
        let found = store.get(&other, &name, &account).expect("its tokens are of use");
        assert_eq!((found.head.n_tokens(), found.head.n_computed(), found.kv.len()), (40, 0, 0), "{other:?}");
    }
    let other_tokenizer = ModelKind { tokenizer: "bytes".to_owned(), ..kind() };
    assert!(store.get(&other_tokenizer, &name, &account).is_none());
    let other_name = ModelKind { model: "draft".to_owned(), ..kind() };
    assert!(store.get(&other_name, &name, &account).is_none());
    assert!(
        store.get(&kind(), &name, &account).is_some_and(|found| found.kv == kept.kv),
        "it is still there"
    );
}

#[test]
fn without_host_memory_the_tokens_come_alone() {
    let (store, _dir) = store(MIB, MIB);
    let name = name(7, "plans");
    store.put(&kind(), &name, &context(40)).expect("kept");
    let poor = Account::new("user", Budget { host_bytes: 10, ..Budget::UNLIMITED }, None);
    let found = store.get(&kind(), &name, &poor).expect("its tokens");
    assert_eq!((found.head.n_tokens(), found.head.n_computed(), found.kv.len()), (40, 0, 0));
}

#[test]
fn nobody_finds_what_another_has_saved_wherever_it_lies() {
    let (store, _dir) = store(MIB, MIB);
    let (ours, others, account) = (name(7, "plans"), name(8, "plans"), account());
    store.put(&kind(), &others, &context(40)).expect("kept");
    assert!(store.get(&kind(), &ours, &account).is_none());
    store.put(&kind(), &ours, &context(3)).expect("kept");
    fs::copy(store.path("tiny", &others), store.path("tiny", &ours)).expect("copied");
    assert!(store.get(&kind(), &ours, &account).is_none());
    assert!(store.get(&kind(), &others, &account).is_some());
    assert!(store.n_bytes(Some(ActorId(7))) == 0 && store.n_bytes(Some(ActorId(8))) > 0);
}

#[test]
fn what_is_no_file_of_ours_is_passed_over_and_replaced() {
    let (store, dir) = store(MIB, MIB);
    let (name, account) = (name(7, "plans"), account());
    store.put(&kind(), &name, &context(40)).expect("kept");
    let path = store.path("tiny", &name);
    let precious = dir.path().join("precious");
    fs::copy(&path, &precious).expect("copied");
    let put: [(&str, &dyn Fn()); 4] = [
        ("a link to a whole file", &|| symlink(&precious, &path).expect("made")),
        ("a link to nothing", &|| symlink("nowhere", &path).expect("made")),
        ("a folder", &|| fs::create_dir_all(path.join("a/b")).expect("made")),
        ("a file without end", &|| symlink("/dev/zero", &path).expect("made")),
    ];
    for (what, put) in put {
        fs::remove_file(&path).expect("a file");
        put();
        assert!(store.get(&kind(), &name, &account).is_none(), "{what}");
        put();
        store.put(&kind(), &name, &context(5)).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(
            store.get(&kind(), &name, &account).is_some_and(|found| found.head.n_tokens() == 5),
            "{what}"
        );
    }
    assert!(precious.exists());
}

#[test]
fn what_was_used_longest_ago_goes_first_and_of_the_user_with_most() {
    let one = {
        let (store, _dir) = store(MIB, MIB);
        store.put(&kind(), &name(1, "a"), &context(100)).expect("kept")
    };
    let (store, _dir) = store(3 * one, 4 * one);
    let there = |uid, called| store.path("tiny", &name(uid, called)).exists();
    let keep = |uid, called, used_s| {
        store.put(&kind(), &name(uid, called), &context(100)).expect("kept");
        date(&store, &name(uid, called), used_s);
    };
    keep(1, "a", 3_000);
    keep(1, "b", 1_000);
    keep(1, "c", 2_000);
    keep(1, "d", 4_000);
    assert_eq!(["a", "b", "c", "d"].map(|called| there(1, called)), [true, false, true, true]);
    keep(2, "a", 10);
    assert!(there(2, "a"));
    keep(2, "b", 20);
    assert_eq!(["a", "c", "d"].map(|called| there(1, called)), [true, false, true]);
    assert!(there(2, "a") && there(2, "b"), "those of the user with most go, not the oldest of all");
    // What is larger than what a user may have is kept without its pages.
    let (long, account) = (name(3, "long"), account());
    store.put(&kind(), &long, &context(1_000)).expect("its tokens fit");
    let found = store.get(&kind(), &long, &account).expect("there");
    assert_eq!((found.head.n_tokens(), found.head.n_computed()), (1_000, 0));
}

#[test]
fn what_does_not_fit_at_all_takes_the_one_before_with_it() {
    let (store, _dir) = store(PAGE_BYTES, MIB);
    let (name, account) = (name(7, "plans"), account());
    store.put(&kind(), &name, &context(1)).expect("kept");
    let error = store.put(&kind(), &name, &context(5_000)).expect_err("too large");
    assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
    assert!(store.get(&kind(), &name, &account).is_none(), "what is kept is never older than what was saved");
}

#[test]
fn on_a_full_disk_the_users_own_make_room_and_nothing_is_left_half_written() {
    let (store, _dir) = store(MIB, MIB);
    let names = ["a", "b", "c"].map(|called| name(7, called));
    for (name, used_s) in names[..2].iter().zip([2_000, 1_000]) {
        store.put(&kind(), name, &context(100)).expect("kept");
        date(&store, name, used_s);
    }
    let folder = store.folder(ActorId(7));
    let write = |path: &Path, parts: &[&[u8]]| {
        write_whole(path, parts)?;
        // A disk with room for two.
        match fs::read_dir(&folder)?.count() > 2 {
            true => Err(io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error())),
            false => Ok(()),
        }
    };
    store.put_by(&kind(), &names[2], &context(100), write).expect("room was made");
    assert_eq!(names.each_ref().map(|name| store.path("tiny", name).exists()), [true, false, true]);
    let full = |_: &Path, _: &[&[u8]]| Err(io::ErrorKind::StorageFull.into());
    store.put_by(&kind(), &names[1], &context(100), full).expect_err("there is no room for anything");
    assert_eq!(files(&folder, TEMPORARY).count(), 0);
}

#[test]
fn what_a_killed_daemon_was_writing_goes_with_the_next_start() {
    let (store, dir) = store(MIB, MIB);
    store.put(&kind(), &name(7, "plans"), &context(40)).expect("kept");
    let half = store.folder(ActorId(7)).join(format!("1234-0.{TEMPORARY}"));
    fs::write(&half, "half").expect("written");
    let begin = || Store::new(dir.path().join("state/contexts"), StoreLimits { of_user: MIB, of_all: MIB });
    drop(begin());
    assert!(half.exists(), "the first may be writing it");
    drop(store);
    let again = begin();
    assert!(!half.exists());
    assert!(again.get(&kind(), &name(7, "plans"), &account()).is_some());
}
