//! Routes of the adapter that a switch loses, also when the network goes without the agent's doing.

use std::fs;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::dataplane::host::*;
use crate::dataplane::node::*;
use tortie_dataplane::Reason;
use tortie_hcn::{Call, Failure, HResult, HcnExt, IpHelper, IpRoute, Kind};
use tortie_hns_emulator::{EmulatedHost, Emulator, Recorder, Survives};
use tortie_windows::{Host, HostRoutes, NETWORK, NetworkKind, NetworkSpec, ensure_network_on};

const ADMINISTRATORS: &str = "192.168.0.0/16";
const WATCHED: Duration = Duration::from_secs(600);

fn ensure(hns: &Emulator, host: &Host) {
    ensure_network_on(hns, &spec(), &[], (host, Some(NODE))).unwrap();
}

fn remove_route(machine: &EmulatedHost, destination: &str) {
    machine.change(|state| state.routes.retain(|route| route.destination.to_string() != destination));
}

/// A folder of this test.
fn folder(test: &str) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("tortie-routes-{}-{test}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The network is made, and its routes are no longer watched.
fn settled(machine: &Arc<EmulatedHost>, file: Option<std::path::PathBuf>) -> (Emulator, Host) {
    let (hns, host) = (hns(machine), host(machine, None, file));
    ensure(&hns, &host);
    let now = Instant::now();
    assert_eq!(host.routes().restore(now), None);
    assert_eq!(there(machine), all());
    assert_eq!(host.routes().restore(now + WATCHED), None);
    (hns, host)
}

/// HNS forgets the network, or somebody removes it.
fn losses() -> [fn(&Emulator); 2] {
    let restarts = |hns: &Emulator| hns.restart(Survives::Nothing).unwrap();
    let removed = |hns: &Emulator| {
        let network = hns.network_by_name(NETWORK).unwrap().unwrap();
        hns.delete_network(network.id).unwrap();
    };
    [restarts, removed]
}

#[test]
fn routes_survive_a_network_that_goes_without_the_agent() {
    for lose in losses() {
        let machine = machine();
        let (hns, host) = settled(&machine, None);
        lose(&hns);
        assert!(
            !machine.routes().unwrap().iter().any(|route| route.destination.to_string() == ADMINISTRATORS)
        );
        ensure(&hns, &host);
        assert_eq!(host.routes().restore(Instant::now()), None);
        assert_eq!(there(&machine), all());
    }
}

#[test]
fn what_an_administrator_has_changed_since_counts() {
    for lose in losses() {
        let machine = machine();
        let (hns, host) = settled(&machine, None);
        remove_route(&machine, ADMINISTRATORS);
        let added = route(104, "10.77.0.0/16", Ipv4Addr::new(172, 16, 0, 252));
        machine.add_route(&added).unwrap();
        ensure(&hns, &host);
        lose(&hns);
        ensure(&hns, &host);
        assert_eq!(host.routes().restore(Instant::now()), None);
        assert_eq!(there(&machine), ["169.254.169.254/32"]);
        assert!(machine.routes().unwrap().contains(&added));
    }
}

/// The agent was away when the network went. Whoever has changed a route since is right.
#[test]
fn a_later_process_adds_what_the_network_had_unless_something_newer_is_there() {
    let folder = folder("later");
    let file = folder.join("routes.json");
    let machine = machine();
    let (hns, first) = settled(&machine, Some(file.clone()));
    drop(first);
    hns.restart(Survives::Nothing).unwrap();
    let newer = route(4, ADMINISTRATORS, Ipv4Addr::new(172, 16, 0, 251));
    machine.add_route(&newer).unwrap();
    let second = host(&machine, None, Some(file));
    ensure(&hns, &second);
    assert_eq!(second.routes().restore(Instant::now()), None);
    assert_eq!(there(&machine), ["169.254.169.254/32"]);
    let of_administrator = |route: &IpRoute| route.destination.to_string() == ADMINISTRATORS;
    let routes: Vec<_> = machine.routes().unwrap().into_iter().filter(of_administrator).collect();
    assert_eq!(routes.len(), 1);
    assert_eq!(routes[0].next_hop, newer.next_hop);
    fs::remove_dir_all(folder).unwrap();
}

/// An agent of an earlier version has kept nothing.
#[test]
fn the_routes_of_a_network_that_is_found_are_kept() {
    let machine = machine();
    let (hns, first) = settled(&machine, None);
    drop(first);
    let second = host(&machine, None, None);
    ensure(&hns, &second);
    hns.restart(Survives::Nothing).unwrap();
    ensure(&hns, &second);
    assert_eq!(second.routes().restore(Instant::now()), None);
    assert_eq!(there(&machine), all());
}

/// The thread compares the routes while HNS still makes the network.
#[test]
fn routes_are_complete_only_after_the_switch_has_taken_the_adapter_over() {
    let machine = machine();
    let hns = Arc::new(Recorder::new(hns(&machine)));
    let host = host(&machine, None, None);
    let (thread, now) = (host.clone(), Instant::now());
    hns.set_fault(move |call| {
        if matches!(call, Call::Create { kind: Kind::Network, .. }) {
            assert_eq!(thread.routes().restore(now), None);
        }
        None
    });
    machine.change(|state| state.refuses = usize::MAX);
    ensure_network_on(&*hns, &spec(), &[], (&host, Some(NODE))).unwrap();
    for minutes in 0..60 {
        let missing = host.routes().restore(now + Duration::from_secs(60 * minutes)).unwrap();
        assert_eq!(missing.reason, Reason::HostRouteMissing);
    }
    let late = host.routes().restore(now + Duration::from_secs(3_600)).unwrap();
    assert!(late.message.contains("no longer tried"), "{}", late.message);
}

/// HNS has taken the adapter over, and reports a failure.
#[test]
fn routes_that_a_failed_attempt_loses_are_not_forgotten() {
    let machine = machine();
    let hns = Recorder::new(hns(&machine));
    let host = host(&machine, None, None);
    let thread = host.clone();
    hns.set_fault(move |call| {
        let is_it = matches!(call, Call::Create { kind: Kind::Network, .. });
        is_it.then(|| {
            thread.routes().restore(Instant::now());
            Err(Failure::new(HResult::HCN_E_SWITCH_NOT_FOUND, "not yet"))
        })
    });
    ensure_network_on(&hns, &spec(), &[], (&host, Some(NODE))).unwrap_err();
    for (destination, _) in lost() {
        remove_route(&machine, destination);
    }
    hns.clear_fault();
    ensure_network_on(&hns, &spec(), &[], (&host, Some(NODE))).unwrap();
    assert_eq!(host.routes().restore(Instant::now()), None);
    assert_eq!(there(&machine), all());
}

/// DHCP gives the adapter another address for good.
#[test]
fn addresses_that_do_not_come_back_are_named_with_a_remedy() {
    let folder = folder("addresses");
    let file = folder.join("routes.json");
    let machine = machine();
    machine.change(|state| state.is_slow = true);
    let (hns, host) = (hns(&machine), host(&machine, None, Some(file.clone())));
    ensure(&hns, &host);
    let now = Instant::now();
    let early = host.routes().restore(now).unwrap();
    assert!(!early.message.contains("restart the agent"), "{}", early.message);
    let late = host.routes().restore(now + Duration::from_secs(3_600)).unwrap();
    let remedy = format!("delete {} and restart the agent", file.display());
    assert!(late.message.contains("no adapter has the addresses of Ethernet again"), "{}", late.message);
    assert!(late.message.contains(&remedy), "{}", late.message);
    // If they come back all the same, the routes do, too.
    machine.settle();
    assert_eq!(host.routes().restore(now + Duration::from_secs(3_601)), None);
    assert_eq!(there(&machine), all());
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn routes_that_a_switch_loses_come_back_once_the_address_does() {
    let machine = machine();
    machine.change(|state| state.is_slow = true);
    let (hns, host) = (hns(&machine), host(&machine, None, None));
    ensure_network_on(&hns, &spec(), &[], (&host, Some(NODE))).unwrap();
    assert_eq!(there(&machine), [""; 0], "the switch has lost them");
    let now = Instant::now();
    let waiting = host.routes().restore(now).unwrap();
    assert!(
        waiting.reason == Reason::HostRouteMissing
            && waiting.message.contains("no adapter has the addresses of Ethernet")
    );
    machine.change(|state| state.refuses = 1);
    machine.settle();
    let refused = host.routes().restore(now).unwrap();
    assert!(refused.message.contains("the route to 169.254.169.254/32"), "{}", refused.message);
    assert_eq!(host.routes().restore(now), None);
    assert_eq!(there(&machine), all());
    let others: Vec<_> = machine.routes().unwrap().into_iter().filter(|route| route.interface == 5).collect();
    assert_eq!(others.len(), 2, "another adapter keeps its own");
    let all_routes = machine.routes().unwrap();
    assert_eq!(
        all_routes.iter().filter(|route| route.destination.prefix_len() == 0).count(),
        1,
        "the system's own work"
    );
    // Something removes one.
    machine.change(|state| state.routes.retain(|route| route.destination.to_string() != "192.168.0.0/16"));
    assert_eq!(host.routes().restore(now + Duration::from_secs(60)), None);
    assert_eq!(there(&machine), all());
    // Much later, that was an administrator.
    assert_eq!(host.routes().restore(now + Duration::from_secs(3_600)), None);
    machine.change(|state| state.routes.clear());
    assert_eq!(host.routes().restore(now + Duration::from_secs(3_601)), None);
    assert_eq!(there(&machine), [""; 0]);
}

#[test]
fn a_later_process_brings_back_what_an_earlier_one_kept() {
    let folder = folder("restart");
    let file = folder.join("routes.json");
    let machine = machine();
    machine.change(|state| state.is_slow = true);
    let (hns, first) = (hns(&machine), host(&machine, None, Some(file.clone())));
    ensure_network_on(&hns, &spec(), &[], (&first, Some(NODE))).unwrap();
    drop(first);
    machine.settle();
    let second = host(&machine, None, Some(file.clone()));
    let now = Instant::now();
    assert_eq!(second.routes().restore(now), None);
    assert_eq!(there(&machine), all());
    assert!(file.exists());
    // They are watched only after the network is known to be there.
    ensure_network_on(&hns, &spec(), &[], (&second, Some(NODE))).unwrap();
    second.routes().restore(now);
    second.routes().restore(now + Duration::from_secs(3_600));
    // Much later, a missing one was removed by an administrator, also for the next process.
    machine.change(|state| state.routes.retain(|route| route.destination.to_string() != "192.168.0.0/16"));
    assert_eq!(host(&machine, None, Some(file)).routes().restore(now), None);
    assert_eq!(there(&machine), ["169.254.169.254/32"]);
    fs::remove_dir_all(folder).unwrap();
}

/// A network that is made anew takes its adapter's routes with it, and the system may not have brought all back before.
#[test]
fn routes_survive_a_network_that_is_made_anew() {
    let machine = machine();
    let hns = Recorder::new(hns(&machine));
    let host = host(&machine, None, None);
    ensure_network_on(&hns, &spec(), &[], (&host, Some(NODE))).unwrap();
    machine.change(|state| state.refuses = 1);
    assert!(host.routes().restore(Instant::now()).is_some(), "one route is not back");
    // An administrator has added one.
    machine.change(|state| state.routes.push(route(104, "10.77.0.0/16", Ipv4Addr::new(172, 16, 0, 252))));
    // At the end of the network, the address is on the physical adapter again, and routes are forgotten.
    hns.set_fault(refuse_second_network);
    let other = NetworkSpec { kind: NetworkKind::Overlay { vni: 4_097 }, ..spec() };
    ensure_network_on(&hns, &other, &[], (&host, Some(NODE))).unwrap();
    assert_eq!(there(&machine), [""; 0]);
    assert_eq!(host.routes().restore(Instant::now()), None);
    assert_eq!(there(&machine), all());
    let of_administrator = |route: &IpRoute| route.destination.to_string() == "10.77.0.0/16";
    assert!(machine.routes().unwrap().iter().any(of_administrator));
}

/// Whoever looks after an hour must find the machine as they left it.
#[test]
fn missing_routes_are_not_added_for_ever() {
    let machine = machine();
    let (hns, host) = (hns(&machine), host(&machine, None, None));
    ensure_network_on(&hns, &spec(), &[], (&host, Some(NODE))).unwrap();
    let now = Instant::now();
    machine.change(|state| state.refuses = usize::MAX);
    for minutes in 0..60 {
        assert!(host.routes().restore(now + Duration::from_secs(60 * minutes)).is_some());
    }
    machine.change(|state| state.refuses = 0);
    let late = host.routes().restore(now + Duration::from_secs(3_600)).unwrap();
    assert!(late.message.contains("no longer tried: add it, or restart the agent"), "{}", late.message);
    assert_eq!(there(&machine), [""; 0]);
    for (net, next_hop) in lost() {
        machine.add_route(&route(104, net, next_hop)).unwrap();
    }
    let now = now + Duration::from_secs(3_601);
    assert_eq!(host.routes().restore(now), None, "somebody has added them");
    // Then they are watched as others are.
    machine.change(|state| state.routes.retain(|route| route.destination.to_string() != "192.168.0.0/16"));
    assert_eq!(host.routes().restore(now), None);
    assert_eq!(there(&machine), all());
}

/// Nothing else of the agent runs: it may wait for a datastore that is behind these routes.
#[test]
fn a_thread_of_its_own_brings_the_routes_back() {
    let machine = machine();
    machine.change(|state| state.is_slow = true);
    let ip: Arc<dyn IpHelper> = machine.clone();
    let routes = Arc::new(HostRoutes::new(ip.clone(), None));
    routes.watch().unwrap();
    let host = Host::new(ip, None, routes);
    ensure_network_on(&hns(&machine), &spec(), &[], (&host, Some(NODE))).unwrap();
    machine.settle();
    let end = Instant::now() + Duration::from_secs(10);
    while there(&machine) != all() {
        assert!(Instant::now() < end, "{:?}", there(&machine));
        std::thread::sleep(Duration::from_millis(5));
    }
}
