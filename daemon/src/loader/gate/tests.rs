use trellis_engine::account::ActorId;

use super::*;

const CLOSED: Duration = Duration::from_secs(10);
const DEVICES: [Device; 2] = [Device::Cpu, Device::Ordinal(1)];

fn user(n: u32, device: Device) -> Cause {
    Cause { wish: Wish::User(ActorId(n)), device }
}

/// How long gates are closed within an hour where some users have loads pressed on two devices as often as they may, and give each up
/// when it suits them: for each of them, and on each device.
fn closed_by(n_users: u32) -> (Vec<Duration>, [Duration; 2]) {
    let (gates, begun) = (Gates::default(), Instant::now());
    let (mut of_users, mut on_devices) = (vec![Duration::ZERO; n_users as usize], [Duration::ZERO; 2]);
    let mut under_way: Vec<(u64, usize, usize, Instant)> = Vec::new();
    let mut random = 7_u64;
    for step in 0..36_000 {
        let now = begun + Duration::from_millis(100) * step;
        for offset in 0..n_users {
            let n_user = ((step + offset) % n_users) as usize;
            for (n_device, device) in DEVICES.into_iter().enumerate() {
                let cause = user(n_user as u32, device);
                if gates.may_close_from(cause, now) > now {
                    continue;
                }
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let takes = CLOSED.min(Duration::from_millis(100 * (1 + (random >> 33) % 150)));
                let number = gates.shut(cause, vec!["a".to_owned()], (now, now + CLOSED));
                under_way.push((number, n_user, n_device, now + takes));
                of_users[n_user] += takes;
                on_devices[n_device] += takes;
            }
        }
        under_way.retain(|&(number, _, _, until)| {
            let is_closed = until > now;
            if !is_closed {
                gates.open(number, now);
            }
            is_closed
        });
    }
    (of_users, on_devices)
}

#[test]
fn gates_are_closed_a_quarter_of_the_time_for_a_user_and_half_of_it_on_a_device() {
    let hour = Duration::from_secs(3600);
    for n_users in [1, 2, 9] {
        let (of_users, on_devices) = closed_by(n_users);
        println!("{n_users} users: {of_users:?}, devices: {on_devices:?}");
        assert!(of_users.iter().all(|closed| *closed <= hour / 4 + CLOSED), "{of_users:?}");
        assert!(on_devices.iter().all(|closed| *closed <= hour / 2 + CLOSED), "{on_devices:?}");
        assert!(of_users.iter().all(|closed| !closed.is_zero()), "everybody has a turn: {of_users:?}");
    }
}

#[test]
fn a_gate_lets_in_who_is_waited_for_and_opens_by_itself() {
    let (gates, now) = (Gates::default(), Instant::now());
    let names = ["a", "b"].map(str::to_owned).to_vec();
    let number = gates.shut(user(2, Device::Cpu), names, (now, now + CLOSED));
    let (other, holder) = (GuestId(1), GuestId(2));
    gates.lock().held.insert(holder, vec!["b".to_owned()]);
    assert_eq!(gates.shut_until("a", other, now), Some(now + CLOSED));
    assert_eq!(gates.shut_until("a", holder, now), None, "b would be waited for in vain");
    assert_eq!(gates.shut_until("c", other, now), None, "it is in nobody's way");
    assert_eq!(gates.shut_until("a", other, now + CLOSED), None, "nobody has to open it");
    gates.let_go(holder, "b");
    assert!(gates.lock().held.is_empty());
    assert_eq!(gates.shut_until("a", holder, now), Some(now + CLOSED));
    gates.open(number, now + CLOSED / 2);
    assert_eq!(gates.shut_until("a", other, now + CLOSED / 2), None);
    let from = |cause| gates.may_close_from(cause, now + CLOSED / 2) - now;
    assert_eq!(from(user(2, Device::Ordinal(1))), CLOSED * 2, "three times as long as it was closed");
    assert_eq!(from(user(3, Device::Cpu)), CLOSED);
    assert_eq!(from(user(3, Device::Ordinal(1))), CLOSED / 2, "at once");
}

#[test]
fn who_waits_for_short_is_pressed_for_in_time() {
    let pace = |model_wait_ms| Pace::of(&Config { model_wait_ms, ..Config::default() });
    let Pace { turn, closed } = pace(60_000);
    assert_eq!((turn, closed), (TURN_MAX, CLOSED_MAX));
    let Pace { turn, closed } = pace(4_000);
    assert_eq!((turn, closed), (Duration::from_secs(1), Duration::from_secs(2)));
}
