use std::sync::{
    atomic::{AtomicUsize, Ordering::Relaxed},
    mpsc,
};

use futures_util::{FutureExt as _, future::join_all};

use super::{peer::FOLLOW_INTERVAL, *};

fn address(last: u8) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, last], 0))
}

/// Makes the last look-up of a name an old one.
fn expire(resolver: &Resolver, name: &str) {
    resolver.0.names.lock().known.get_mut(name).unwrap().looked_up = None;
}

/// Looks the name `a` up, however long that takes.
async fn look_up_again(resolver: &Resolver) {
    expire(resolver, "a");
    resolver.resolve("a").await.unwrap();
    while resolver.0.names.lock().known["a"].looked_up.is_none() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Returns a resolver whose look-ups wait for an answer each, and a sender of answers.
fn answered_by_hand() -> (Resolver, mpsc::Sender<io::Result<u8>>, Arc<AtomicUsize>) {
    answered_by_hand_with(STAY)
}

fn answered_by_hand_with(stay: Duration) -> (Resolver, mpsc::Sender<io::Result<u8>>, Arc<AtomicUsize>) {
    let (answers, received) = mpsc::channel();
    let (received, asked) = (Mutex::new(received), Arc::new(AtomicUsize::new(0)));
    let count = asked.clone();
    let resolver = Resolver::with_stay(stay, move |_| {
        count.fetch_add(1, Relaxed);
        let answer: io::Result<u8> = received.lock().recv().unwrap_or(Ok(0));
        answer.map(|last| vec![address(last)])
    });
    (resolver, answers, asked)
}

fn no_server() -> io::Result<u8> {
    Err(io::Error::other("no server answers"))
}

#[tokio::test]
async fn i18_1_the_last_addresses_serve_while_no_name_server_answers() {
    let (resolver, answers, asked) = answered_by_hand();
    answers.send(Ok(1)).unwrap();
    assert_eq!(resolver.addresses("a:80").await.unwrap(), [SocketAddr::from(([127, 0, 0, 1], 80))]);
    expire(&resolver, "a");
    answers.send(no_server()).unwrap();
    // I18.1
    assert_eq!(*resolver.resolve("a").await.unwrap(), [address(1)], "it fails");
    expire(&resolver, "a");
    let began = Instant::now();
    // I18.1
    assert_eq!(*resolver.resolve("a").await.unwrap(), [address(1)], "it takes long");
    let took = began.elapsed();
    assert!(took >= MAX_WAIT && took < Duration::from_secs(10), "{took:?}");
    let at_once = resolver.resolve("a").now_or_never().expect("the look-up was waited for already");
    assert_eq!(*at_once.unwrap(), [address(1)]);
    // The look-up went on: what it finds is used.
    answers.send(Ok(2)).unwrap();
    let begin = Instant::now();
    while *resolver.resolve("a").await.unwrap() != [address(2)] {
        assert!(begin.elapsed() < Duration::from_secs(10));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(asked.load(Relaxed), 3);
}

#[tokio::test]
async fn i18_1_addresses_of_a_name_that_is_gone_for_ten_minutes_are_forgotten() {
    let (resolver, answers, _) = answered_by_hand();
    let gone = || Err(io::Error::other("failed to lookup address information: Name or service not known"));
    let is_old = |resolver: &Resolver| {
        expire(resolver, "a");
        let mut names = resolver.0.names.lock();
        let name = names.known.get_mut("a").unwrap();
        name.resolved = Some(Instant::now().checked_sub(MAX_AGE).unwrap());
    };
    answers.send(Ok(1)).unwrap();
    resolver.resolve("a").await.unwrap();
    expire(&resolver, "a");
    for answer in [gone(), no_server()] {
        answers.send(answer).unwrap();
        // I18.1
        assert_eq!(*resolver.resolve("a").await.unwrap(), [address(1)]);
        is_old(&resolver);
    }
    answers.send(gone()).unwrap();
    // The one that finds it out still has them.
    resolver.resolve("a").await.unwrap();
    answers.send(gone()).unwrap();
    expire(&resolver, "a");
    // I18.1
    resolver.resolve("a").await.unwrap_err();
}

#[tokio::test]
async fn i18_2_a_name_is_looked_up_once_at_a_time_and_again_when_its_addresses_are_old() {
    let (resolver, answers, asked) = answered_by_hand();
    let answer = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        answers.send(Ok(1)).unwrap();
    };
    let (found, ()) = tokio::join!(join_all((0..50).map(|_| resolver.resolve("a"))), answer);
    for found in found {
        assert_eq!(*found.unwrap(), [address(1)]);
    }
    resolver.resolve("a").await.unwrap();
    // I18.2
    assert_eq!(asked.load(Relaxed), 1, "fresh addresses need none");
    // The record changes.
    answers.send(Ok(2)).unwrap();
    let begin = Instant::now();
    while *resolver.resolve("a").await.unwrap() != [address(2)] {
        assert!(begin.elapsed() < FRESH_FOR * 2, "it is followed within seconds");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(asked.load(Relaxed), 2);
}

#[tokio::test]
async fn i18_5_a_connection_is_used_until_look_ups_lack_its_peer() {
    let (resolver, answers, asked) = answered_by_hand_with(Duration::ZERO);
    answers.send(Ok(1)).unwrap();
    resolver.resolve("a").await.unwrap();
    let peer = resolver.peer("a:80", address(1)).unwrap();
    assert!(resolver.peer("127.0.0.1:80", address(1)).is_none());
    for answer in [no_server(), Ok(1)] {
        answers.send(answer).unwrap();
        expire(&resolver, "a");
        resolver.resolve("a").await.unwrap();
        // I18.5
        assert!(peer.is_current());
    }
    resolver.follow("a");
    assert_eq!((asked.load(Relaxed), resolver.0.names.lock().known["a"].pending.is_some()), (3, false));
    resolver.0.names.lock().known.get_mut("a").unwrap().looked_up =
        Instant::now().checked_sub(FOLLOW_INTERVAL);
    answers.send(Ok(2)).unwrap();
    resolver.follow("a");
    let begin = Instant::now();
    // I18.5
    while peer.is_current() {
        assert!(begin.elapsed() < Duration::from_secs(10));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(resolver.peer("a:80", address(2)).unwrap().is_current());
}

#[tokio::test]
async fn i18_5_a_connection_stays_for_a_minute_while_look_ups_lack_its_peer() {
    let answers = Arc::new(Mutex::new(vec![address(1), address(2)]));
    let said = answers.clone();
    let resolver = Resolver::new(move |_| Ok(said.lock().clone()));
    let look_up = async |addresses: &[u8]| {
        *answers.lock() = addresses.iter().copied().map(address).collect();
        look_up_again(&resolver).await;
    };
    resolver.resolve("a").await.unwrap();
    let [first, second] = [1, 2].map(|last| resolver.peer("a:80", address(last)).unwrap());
    let are_current = || (first.is_current(), second.is_current());
    let a_minute_passes = || {
        let mut names = resolver.0.names.lock();
        for since in names.known.get_mut("a").unwrap().missing.values_mut() {
            *since = since.checked_sub(STAY).unwrap();
        }
    };
    for addresses in [[2].as_slice(), &[1, 2], &[1], &[1]] {
        look_up(addresses).await;
        // I18.5
        assert_eq!(are_current(), (true, true), "{addresses:?}");
    }
    a_minute_passes();
    look_up(&[1, 2]).await;
    // I18.5: one look-up that has it begins the minute anew; two entries may be the same address
    look_up(&[1, 1]).await;
    assert_eq!(are_current(), (true, true));
    a_minute_passes();
    look_up(&[1, 1]).await;
    // I18.5
    assert_eq!(are_current(), (true, false));
    for begin in 0..8 {
        *answers.lock() = (0..=u8::MAX).map(|last| ([127, 0, begin, last], 0).into()).collect();
        look_up_again(&resolver).await;
    }
    assert!(resolver.0.names.lock().known["a"].missing.len() <= MAX_MISSING);
    assert!(!first.is_current(), "those that are missing for the longest time are dropped");
}

/// Waits until a number of look-ups run, and no more.
async fn until_running(running: &AtomicUsize, expected: usize) {
    let begin = Instant::now();
    while running.load(Relaxed) != expected {
        assert!(begin.elapsed() < Duration::from_secs(20), "{} run", running.load(Relaxed));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(running.load(Relaxed), expected);
}

#[tokio::test]
async fn i18_3_names_of_a_server_that_is_down_leave_room_for_others() {
    let (running, is_down) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(true)));
    let (count, down) = (running.clone(), is_down.clone());
    let resolver = Resolver::new(move |name| {
        if name == "up" {
            return Ok(vec![address(1)]);
        }
        count.fetch_add(1, Relaxed);
        while *down.lock() {
            thread::sleep(Duration::from_millis(1));
        }
        count.fetch_sub(1, Relaxed);
        Err(io::Error::other("no server answers"))
    });
    let all_fail = async || {
        let asked: Vec<String> = (0..MAX_AT_ONCE * 2).map(|number| format!("down-{number}")).collect();
        join_all(asked.iter().map(|name| resolver.resolve(name))).await.iter().all(Result::is_err)
    };
    let first = async {
        // I18.3
        until_running(&running, MAX_AT_ONCE).await;
        // They are slow from now on.
        tokio::time::sleep(SLOW).await;
        *is_down.lock() = false;
    };
    assert!(tokio::join!(all_fail(), first).0);
    *is_down.lock() = true;
    // The others began when the server was up again.
    for name in resolver.0.names.lock().known.values_mut() {
        name.is_slow = true;
    }
    let second = async {
        // I18.3
        until_running(&running, MAX_SLOW_AT_ONCE).await;
        assert_eq!(*resolver.resolve("up").await.unwrap(), [address(1)]);
        *is_down.lock() = false;
    };
    assert!(tokio::join!(all_fail(), second).0);
    assert_eq!(resolver.0.names.lock().slow_threads, 0);
}

#[tokio::test]
async fn i18_4_a_name_that_was_never_resolved_is_named() {
    let (resolver, answers, _) = answered_by_hand();
    answers.send(no_server()).unwrap();
    let problem = resolver.addresses("a:80").await.unwrap_err().to_string();
    assert_eq!(problem, "the name `a` cannot be resolved: no server answers");
    assert_eq!(resolver.addresses("[::1]:80").await.unwrap(), ["[::1]:80".parse().unwrap()]);
    assert!(resolver.addresses("a").await.unwrap_err().to_string().contains("host:port"));
    answers.send(Ok(1)).unwrap();
    resolver.resolve("a").await.unwrap();
    let system = Resolver::default();
    assert!(system.resolve("localhost").await.unwrap().iter().all(|found| found.ip().is_loopback()));
}

#[tokio::test]
async fn the_name_that_was_not_used_for_the_longest_time_makes_room() {
    let resolver = Resolver::new(|_| Ok(vec![address(1)]));
    for number in 0..MAX_NAMES {
        resolver.0.names.lock().known.insert(number.to_string().into(), Name::new(Instant::now()));
    }
    resolver.resolve("0").await.unwrap();
    let peer = resolver.peer("1:80", address(2)).unwrap();
    assert!(peer.is_current());
    resolver.resolve("new").await.unwrap();
    {
        let names = resolver.0.names.lock();
        assert_eq!(names.known.len(), MAX_NAMES);
        let known = ["0", "new", "1"].map(|name| names.known.contains_key(name));
        assert_eq!(known, [true, true, false]);
    }
    assert!(peer.is_current());
    resolver.resolve("1").await.unwrap();
    assert!(!peer.is_current(), "a connection of a name that was forgotten follows it again");
}
