use super::*;
use crate::directory::village::Village;

fn classes(text: &str) -> Result<Classes, ClassError> {
    Classes::in_directory(&toml::from_str(text).expect("it parses"), Arc::new(Village))
}

fn class_of(classes: &Classes, uid: u32, gid: u32) -> String {
    let actor = Actor { uid, gid };
    classes.look_up(actor).unwrap_or_else(|_| classes.in_any_case(actor)).name().to_owned()
}

#[test]
fn users_come_before_groups_and_of_groups_the_highest_rank_decides() {
    let text =
        "[a]\ngroups = ['staff']\nshare = 50\n[b]\ngroups = ['lab']\nrank = 1\n[c]\nusers = ['bob', 9]";
    let classes = classes(text).expect("all are known");
    let of = |uid, gid| class_of(&classes, uid, gid);
    assert_eq!((of(1, 10), of(2, 10), of(9, 11)), ("b".to_owned(), "c".to_owned(), "c".to_owned()));
    // The machine says which groups a user is in, and the connection never, also where the machine knows no such user, or not now.
    assert_eq!(
        (of(1, 99), of(7, 11), of(7, 99), of(3, 10)),
        ("b".into(), "default".into(), "default".into(), "default".into())
    );
}

#[test]
fn who_cannot_be_looked_up_has_no_more_than_it_has_in_any_case() {
    let of = |text: &str, uid| {
        let classes = classes(text).expect("all are known");
        let class = classes.in_any_case(Actor { uid, gid: 11 }).info();
        (class.name, class.share, class.rank)
    };
    let better = "[lab]\ngroups = ['lab']\nshare = 9\nrank = 3";
    assert_eq!(of(better, 3), ("default".to_owned(), 1, 0));
    // One that may be in a class that has less than strangers have is not better off for it.
    let worse = "[default]\nshare = 4\nrank = 2\n[lab]\ngroups = ['lab']\nshare = 2\nrank = 7\n[bulk]\ngroups = ['staff']\nshare = 3";
    assert_eq!(of(worse, 3), ("default".to_owned(), 2, 0));
    // Whom a class names needs no groups.
    assert_eq!(of("[a]\nusers = [3]\nshare = 5\n[lab]\ngroups = ['lab']", 3), ("a".to_owned(), 5, 0));
}

#[test]
fn of_groups_of_one_rank_the_highest_share_decides_and_then_the_name() {
    for (text, class) in [
        ("[a]\ngroups = ['staff']\n[b]\ngroups = ['lab']\nshare = 2", "b"),
        ("[a]\ngroups = ['staff']\n[b]\ngroups = ['lab']", "a"),
        ("[a]\ngroups = ['staff', 'lab', 10, 'staff']", "a"),
    ] {
        assert_eq!(class_of(&classes(text).expect("all are known"), 1, 10), class, "{text}");
    }
}

#[test]
fn without_groups_there_is_nothing_to_look_up_and_the_default_may_have_a_share() {
    let with_users = classes("[default]\nshare = 4\nrank = 2\n[a]\nusers = ['ada']").expect("all are known");
    let at_hand = |uid| with_users.at_hand(Actor { uid, gid: 10 }).expect("no class has groups");
    assert_eq!(at_hand(1).info(), ClassInfo { name: "a".to_owned(), share: 1, ..ClassInfo::default() });
    assert_eq!(
        at_hand(2).info(),
        ClassInfo { name: "default".to_owned(), share: 4, rank: 2, ..ClassInfo::default() }
    );
    assert_eq!(Classes::default().in_any_case(Actor { uid: 1, gid: 1 }).priority(), Priority::EVEN);
    let with_groups = classes("[a]\ngroups = [10]\nusers = [5]").expect("all are known");
    assert!(with_groups.at_hand(Actor { uid: 1, gid: 10 }).is_none());
    assert!(with_groups.at_hand(Actor { uid: 5, gid: 10 }).is_some());
}

#[test]
fn who_is_unknown_or_in_two_classes_is_an_error_that_names_them() {
    for (text, message) in [
        ("[a]\nusers = ['adda']", "classes.a: this machine has no user \"adda\"; did you mean \"ada\"?"),
        (
            "[a]\ngroups = ['stuff']",
            "classes.a: this machine has no group \"stuff\"; did you mean \"staff\"?",
        ),
        ("[a]\ngroups = ['nosuch']", "classes.a: this machine has no group \"nosuch\""),
        ("[a]\nusers = ['ada']\n[b]\nusers = [1]", "classes.b: the user 1 is in classes.a already"),
        ("[a]\ngroups = [11]\n[b]\ngroups = ['lab']", "classes.b: the group \"lab\" is in classes.a already"),
        ("[a]\nusers = ['slow']", "classes.a: the user \"slow\" cannot be looked up: timed out"),
    ] {
        assert_eq!(classes(text).expect_err(text).to_string(), message);
    }
}

#[test]
fn a_class_says_how_much_its_users_may_have() {
    let text = "[default.limits]\nn_guests = 4\n[lab]\ngroups = ['lab']\n\
                [lab.limits]\nn_pages = 900\nn_guests = 90\nhost_bytes = 7\n[a]\nusers = [9]";
    let classes = classes(text).expect("all are known");
    let most = Budget { n_tokens: 1000, n_pages: 100, n_contexts: 10, host_bytes: 10 };
    let of = |class: &Class| (class.budget(most), class.n_guests(20));
    let look_up = |uid| classes.look_up(Actor { uid, gid: 1 }).expect("the village answers");
    assert_eq!(of(&look_up(1)), (Budget { n_pages: 900, host_bytes: 7, ..most }, 90));
    assert_eq!(of(&look_up(9)), (most, 20), "a class that says nothing");
    assert_eq!(of(&look_up(7)), (most, 4), "the default");
    assert_eq!(look_up(1).limit("budgets.user.n_pages", 100), Some(900));
    assert_eq!(look_up(1).limit("budgets.user.n_contexts", 10), None);
    let info = look_up(1).info();
    assert_eq!((info.limits["n_guests"], info.limits.len()), (90, 3));
    // Whom nobody can look up has no more than it has in any class, nor than anybody.
    let stranger = classes.in_any_case(Actor { uid: 3, gid: 1 });
    assert_eq!(of(&stranger), (Budget { host_bytes: 7, ..most }, 4));
}
