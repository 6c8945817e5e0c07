use std::{
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use pointsman_workers::{Registry, Resolver};
use simple_dns::{
    CLASS, Name, Packet, PacketFlag, QTYPE, RCODE, ResourceRecord, TYPE,
    rdata::{A, RData, SRV},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UdpSocket},
    task::AbortHandle,
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use super::*;
use crate::{
    fleet::{Fleet, FleetRules, SourceState},
    guard::GuardRules,
    source::start,
};

/// The server's answer to a query.
#[derive(Clone, Debug)]
enum Says {
    Targets(Vec<(String, u16)>),
    /// The target `engine.example:8000`, with the address in the answer, or in that to a question for it.
    /// With none, the server does not know the target, or has none of IPv4 and is silent about IPv6 (`adds`).
    Host {
        address: Option<[u8; 4]>,
        adds: bool,
    },
    NoSuchName,
    Nothing,
    Silence,
}

struct Server {
    address: SocketAddr,
    says: Arc<Mutex<Says>>,
    asked: Arc<AtomicU64>,
    over_tcp: Arc<AtomicU64>,
    /// Whether it closes connections without an answer.
    refuses_tcp: Arc<AtomicBool>,
    /// Whether it leaves records out of its answers over UDP, and does not say so.
    shortens_udp: Arc<AtomicBool>,
    tcp: AbortHandle,
}

impl Server {
    async fn start(tracker: &TaskTracker) -> Self {
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        let udp = UdpSocket::bind(address).await.unwrap();
        let server_says = Arc::new(Mutex::new(Says::NoSuchName));
        let [server_asked, over_tcp]: [Arc<AtomicU64>; 2] = Default::default();
        let [refuses_tcp, shortens_udp]: [Arc<AtomicBool>; 2] = Default::default();
        let (says, asked) = (server_says.clone(), server_asked.clone());
        let shortens = shortens_udp.clone();
        tracker.spawn(async move {
            let mut buffer = [0; 1_024];
            while let Ok((length, from)) = udp.recv_from(&mut buffer).await {
                asked.fetch_add(1, Ordering::Relaxed);
                let mut said = says.lock().clone();
                if let Says::Targets(targets) = &mut said
                    && shortens.load(Ordering::Relaxed)
                {
                    targets.truncate(3);
                }
                let _ = udp.send_to(&buffer[..1], from).await;
                // First, an answer to another question.
                let mut stray = buffer[..length].to_vec();
                stray[0] ^= 1;
                stray[2] |= 0x80;
                let _ = udp.send_to(&stray, from).await;
                if let Some(answer) = answer(&buffer[..length], &said, 512) {
                    let _ = udp.send_to(&answer, from).await;
                }
            }
        });
        let (says, count) = (server_says.clone(), over_tcp.clone());
        let refuses = refuses_tcp.clone();
        let tcp = tracker.spawn(async move {
            let mut silent = Vec::new();
            while let Ok((mut stream, _)) = tcp.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                if refuses.load(Ordering::Relaxed) {
                    continue;
                }
                let Ok(length) = stream.read_u16().await else { continue };
                let mut query = vec![0; length.into()];
                let Ok(_) = stream.read_exact(&mut query).await else { continue };
                let said = says.lock().clone();
                let Some(answer) = answer(&query, &said, 65_535) else {
                    silent.push(stream);
                    continue;
                };
                let length = u16::try_from(answer.len()).unwrap();
                let _ = stream.write_all(&[&length.to_be_bytes()[..], &answer].concat()).await;
            }
        });
        Self {
            address,
            says: server_says,
            asked: server_asked,
            over_tcp,
            refuses_tcp,
            shortens_udp,
            tcp: tcp.abort_handle(),
        }
    }

    fn say(&self, targets: impl IntoIterator<Item = u16>) {
        let targets = targets.into_iter().map(|port| (format!("engine-{port}.example"), port));
        *self.says.lock() = Says::Targets(targets.collect());
    }
}

fn answer(query: &[u8], says: &Says, most: usize) -> Option<Vec<u8>> {
    let query = Packet::parse(query).unwrap();
    let mut reply = query.clone().into_reply();
    match says {
        Says::Silence => return None,
        Says::NoSuchName => *reply.rcode_mut() = RCODE::NameError,
        Says::Nothing | Says::Host { .. } => {}
        Says::Targets(targets) => {
            for (target, port) in targets {
                let target = Name::new(target).unwrap();
                let srv = RData::SRV(SRV { priority: 0, weight: 0, port: *port, target });
                let name = query.questions[0].qname.clone();
                reply.answers.push(ResourceRecord::new(name, CLASS::IN, 0, srv));
            }
        }
    }
    if let Says::Host { address, adds } = says {
        let target = Name::new("engine.example").unwrap();
        let address = address.map(|address| {
            let a = RData::A(A { address: u32::from_be_bytes(address) });
            ResourceRecord::new(target.clone(), CLASS::IN, 0, a)
        });
        let name = query.questions[0].qname.clone();
        match query.questions[0].qtype {
            QTYPE::TYPE(TYPE::SRV) => {
                let srv = RData::SRV(SRV { priority: 0, weight: 0, port: 8_000, target });
                reply.answers.push(ResourceRecord::new(name, CLASS::IN, 0, srv));
                reply.additional_records.extend(address.filter(|_| *adds));
            }
            QTYPE::TYPE(TYPE::AAAA) if address.is_none() && *adds => return None,
            _ if address.is_none() && !adds => *reply.rcode_mut() = RCODE::NameError,
            QTYPE::TYPE(TYPE::A) => reply.answers.extend(address.filter(|_| !adds)),
            _ => {}
        }
    }
    let bytes = reply.build_bytes_vec().unwrap();
    if bytes.len() <= most {
        return Some(bytes);
    }
    reply.set_flags(PacketFlag::TRUNCATION);
    let mut cut = reply.build_bytes_vec().unwrap();
    // Within a record, as some servers do.
    cut.truncate(most);
    Some(cut)
}

/// What the system says to each question for addresses.
const SYSTEM: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(127, 0, 0, 9)), 0);
/// Time limit of servers that answer.
const TIMEOUT: Duration = Duration::from_secs(10);

struct Running {
    fleet: Arc<Fleet>,
    registry: Arc<Registry>,
    resolver: Resolver,
    _stop: DropGuard,
}

fn config(servers: Vec<SocketAddr>, timeout: Duration) -> DnsSourceConfig {
    let defaults =
        [("engine", "vllm"), ("role", "decode")].map(|(key, value)| (key.to_owned(), value.to_owned()));
    DnsSourceConfig {
        record: "_http._tcp.engines.example.".to_owned(),
        servers,
        interval: Duration::from_millis(20),
        timeout,
        scheme: Scheme::Http,
        defaults: defaults.into(),
    }
}

fn run(servers: Vec<SocketAddr>, timeout: Duration, tracker: &TaskTracker) -> Running {
    let guard = GuardRules { share: 0.5, min_workers: 3, confirm_after: Duration::from_millis(200) };
    let rules = FleetRules { max_workers: 200, drain: Duration::from_secs(30), moves: false, guard };
    let registry = Arc::new(Registry::default());
    let resolver = Resolver::new(|_| Ok(vec![SYSTEM]));
    let fleet = Fleet::new(registry.clone(), resolver.clone(), rules);
    let stop = CancellationToken::new();
    start(DnsSource::new(config(servers, timeout)), fleet.add_source("dns:a"), tracker, stop.clone());
    tracker.spawn(fleet.clone().run(stop.clone()));
    Running { fleet, registry, resolver, _stop: stop.drop_guard() }
}

impl Running {
    fn urls(&self) -> Vec<String> {
        let snapshot = self.registry.snapshot();
        let mut urls: Vec<String> =
            snapshot.workers().iter().map(|worker| worker.spec().url.to_string()).collect();
        urls.sort_unstable();
        urls
    }

    fn problem(&self) -> String {
        self.fleet.status().sources[2].problem.clone().unwrap_or_default()
    }

    async fn until(&self, what: &str, check: impl Fn(&Self) -> bool) {
        for _ in 0..6_000 {
            if check(self) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{what}: {:?} {:?}", self.urls(), self.fleet.status());
    }
}

#[tokio::test]
async fn p7_records_are_followed_and_a_name_that_is_gone_changes_nothing() {
    let tracker = TaskTracker::new();
    for refuses_tcp in [false, true] {
        let (server, silent) = (Server::start(&tracker).await, Server::start(&tracker).await);
        server.refuses_tcp.store(refuses_tcp, Ordering::Relaxed);
        *silent.says.lock() = Says::Silence;
        let timeout = Duration::from_millis(300);
        let running = run(vec![silent.address, server.address], timeout, &tracker);
        running.until("it is away", |running| running.problem().contains("NXDOMAIN")).await;
        server.say([1, 2]);
        // P7.1: the second server answers, and the changes are followed
        running.until("they joined", |running| running.urls().len() == 2).await;
        assert_eq!(running.urls()[0], "http://engine-1.example:1");
        server.say([1, 2, 3, 4]);
        running.until("others joined", |running| running.urls().len() == 4).await;
        let not_offered = vec![(".".to_owned(), 5), ("engine-1.example".to_owned(), 0)];
        for (says, expected) in [
            (Says::NoSuchName, "does not exist (NXDOMAIN)"),
            (Says::Nothing, "has no SRV records"),
            // P7.5
            (Says::Targets(not_offered), "has no SRV records"),
            (Says::Silence, "no answer within"),
        ] {
            *server.says.lock() = says;
            let seen = server.asked.load(Ordering::Relaxed) + server.over_tcp.load(Ordering::Relaxed);
            let asked = |server: &Server| {
                server.asked.load(Ordering::Relaxed) + server.over_tcp.load(Ordering::Relaxed) > seen + 4
            };
            let is_told = |running: &Running| asked(&server) && running.problem().contains(expected);
            running.until("the problem is told", is_told).await;
            // P7.2
            assert_eq!(running.urls().len(), 4);
        }
        server.say([4]);
        running.until("it is back, and the removal confirmed", |running| running.urls().len() == 1).await;
        assert_eq!(running.fleet.status().sources[2].state, SourceState::Present);
        assert!(!refuses_tcp || server.asked.load(Ordering::Relaxed) > 0);
    }
}

#[tokio::test]
async fn p7_an_answer_that_does_not_fit_a_datagram_is_asked_for_over_tcp() {
    let tracker = TaskTracker::new();
    let server = Server::start(&tracker).await;
    server.say([1, 2]);
    server.refuses_tcp.store(true, Ordering::Relaxed);
    let running = run(vec![server.address], TIMEOUT, &tracker);
    running.until("they joined over UDP", |running| running.urls().len() == 2).await;
    server.refuses_tcp.store(false, Ordering::Relaxed);
    server.say(1..=100);
    // P7.3: it is asked over UDP first for a minute
    running.until("all joined", |running| running.urls().len() == 100).await;
}

#[tokio::test]
async fn p7_records_that_a_server_leaves_out_of_its_answers_over_udp_are_found() {
    let tracker = TaskTracker::new();
    let server = Server::start(&tracker).await;
    server.shortens_udp.store(true, Ordering::Relaxed);
    server.say(1..=8);
    let running = run(vec![server.address], TIMEOUT, &tracker);
    // P7.4
    running.until("they joined", |running| !running.urls().is_empty()).await;
    assert_eq!(running.urls().len(), 8);
    server.refuses_tcp.store(true, Ordering::Relaxed);
    running.until("it is away", |running| running.problem().contains("over TCP")).await;
    // P7.4
    assert_eq!((running.urls().len(), server.asked.load(Ordering::Relaxed)), (8, 0));
}

#[tokio::test]
async fn p7_a_server_that_answered_over_tcp_is_asked_over_udp_when_it_refuses_tcp_and_not_when_it_is_silent()
{
    let server = Server::start(&TaskTracker::new()).await;
    server.say([1]);
    let mut transports = Transports::default();
    let mut ask = async |timeout| {
        let records = transports.srv("engines.example", server.address, timeout).await;
        (records.map(|records| records.targets.len()).ok(), server.asked.load(Ordering::Relaxed))
    };
    assert_eq!(ask(TIMEOUT).await, (Some(1), 0));
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(660)).await;
    tokio::time::resume();
    *server.says.lock() = Says::Silence;
    // P7.4
    assert_eq!(ask(Duration::from_millis(300)).await, (None, 0));
    server.say([1, 2]);
    server.tcp.abort();
    while TcpStream::connect(server.address).await.is_ok() {}
    // P7.4
    assert_eq!(ask(TIMEOUT).await, (Some(2), 1));
}

#[tokio::test]
async fn p7_targets_have_the_addresses_that_their_server_says() {
    let tracker = TaskTracker::new();
    for adds in [true, false] {
        let server = Server::start(&tracker).await;
        *server.says.lock() = Says::Host { address: Some([127, 0, 0, 5]), adds };
        let running = run(vec![server.address], TIMEOUT, &tracker);
        running.until("it joined", |running| running.urls() == ["http://engine.example:8000"]).await;
        let address = async || running.resolver.addresses("engine.example:8000").await.unwrap()[0];
        let of_server = SocketAddr::from(([127, 0, 0, 5], 8_000));
        // P7.6
        assert_eq!(address().await, of_server);
        let configured = "role=decode,engine=vllm,url=http://engine.example:9000";
        running.fleet.set_configured(&[WorkerSpec::parse_flag(configured).unwrap()]);
        // P7.6
        assert_eq!(address().await.ip(), SYSTEM.ip(), "another worker has the host");
        running.fleet.set_configured(&[]);
        assert_eq!(address().await, of_server);
        *server.says.lock() = Says::Host { address: None, adds: false };
        // P7.6
        while address().await.ip() != SYSTEM.ip() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        server.say([1]);
        running.until("another one is there", |running| running.urls()[0].contains("engine-1")).await;
        let addresses = running.resolver.addresses("engine-1.example:1").await.unwrap();
        // P7.6
        assert_eq!(addresses, [SocketAddr::new(SYSTEM.ip(), 1)], "the server does not know it");
    }
}

#[tokio::test]
async fn p7_targets_keep_their_addresses_while_their_server_is_silent() {
    let tracker = TaskTracker::new();
    let server = Server::start(&tracker).await;
    *server.says.lock() = Says::Host { address: Some([127, 0, 0, 5]), adds: true };
    let running = run(vec![server.address], Duration::from_millis(300), &tracker);
    running.until("it joined", |running| !running.urls().is_empty()).await;
    *server.says.lock() = Says::Host { address: None, adds: true };
    let (asked, before) =
        (|| server.over_tcp.load(Ordering::Relaxed), server.over_tcp.load(Ordering::Relaxed));
    running.until("it asked in vain", |_| asked() > before + 6).await;
    // P7.6
    assert_eq!(running.resolver.addresses("engine.example:1").await.unwrap(), [([127, 0, 0, 5], 1).into()]);
}

#[test]
fn p10_workers_of_records_may_have_tls() {
    let config = DnsSourceConfig { scheme: Scheme::Https, ..config(Vec::new(), TIMEOUT) };
    let targets = [("engine.example".to_owned(), 8_000)].into();
    let records = Records { targets, addresses: BTreeMap::new(), ttl: TIMEOUT };
    let snapshot = DnsSource::new(config).snapshot(&records);
    // P10.4
    assert_eq!(&*snapshot.workers[0].spec.url, "https://engine.example:8000");
}

#[tokio::test]
async fn the_servers_of_this_host_are_read_from_resolv_conf() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        file.path(),
        "search a.example\nnameserver 10.0.0.1\n nameserver ::1\n#nameserver 10.9.9.9\n",
    )
    .unwrap();
    let servers = system_servers(file.path()).await.unwrap();
    let shown: Vec<String> = servers.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["10.0.0.1:53", "[::1]:53"]);
    std::fs::write(file.path(), "").unwrap();
    assert!(system_servers(file.path()).await.unwrap_err().contains("names no server"));
}
