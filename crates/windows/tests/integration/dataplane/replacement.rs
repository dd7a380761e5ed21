//! A network that is made anew while others create endpoints, on an HNS that deletes endpoints together with their network.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::dataplane::bridge::{NODE_ENDPOINT, bridge, network};
use crate::dataplane::node::*;
use tortie_dataplane::PodWiring;
use tortie_hcn::schema::{Endpoint, IpConfig};
use tortie_hcn::{Adapter, Call, Guid, Hcn, HcnExt, IpHelper, Kind};
use tortie_hns_emulator::{Config, EmulatedHost, Emulator, Recorder};
use tortie_windows::{
    Error, Host, HostRoutes, NetworkKind, NetworkSpec, PodNetwork, WindowsWiring, ensure_network_on,
};

const ANCHOR: &str = "Tortie-anchor";

/// A machine with one adapter, and its HNS.
fn machine() -> (Arc<Recorder<Emulator>>, Host) {
    let adapter = Adapter {
        index: 4,
        name: "Ethernet".to_owned(),
        mac: None,
        mtu: 1500,
        is_up: true,
        addresses: vec!["172.16.0.3/24".parse().unwrap()],
    };
    let machine = Arc::new(EmulatedHost::new(vec![adapter], vec![]));
    let config = Config {
        deletes_used_networks: true,
        ..Config::new(Config::SERVER_2022, Ipv4Addr::new(172, 16, 0, 3))
    };
    let hns = Emulator::new(config).on_host(machine.clone());
    let ip: Arc<dyn IpHelper> = machine;
    let host = Host::new(ip.clone(), None, Arc::new(HostRoutes::new(ip, None)));
    (Arc::new(Recorder::new(hns)), host)
}

fn ensure(hns: &dyn Hcn, host: &Host, spec: &NetworkSpec) -> Result<PodNetwork, Error> {
    ensure_network_on(hns, spec, &[], (host, Some(NODE)))
}

fn makes_anchor(call: &Call) -> bool {
    matches!(call, Call::Create { kind: Kind::Network, settings, .. } if settings.contains(ANCHOR))
}

/// Somebody creates an endpoint while the network that keeps the switch is made.
fn create_meanwhile(hns: &Arc<Recorder<Emulator>>, network: Guid) {
    let weak = Arc::downgrade(hns);
    hns.set_fault(move |call| {
        if makes_anchor(call) {
            let config = IpConfig { ip_address: POD.to_string(), ..Default::default() };
            let endpoint = Endpoint {
                host_compute_network: network,
                ip_configurations: vec![config],
                ..Default::default()
            };
            weak.upgrade()?.inner().create_endpoint(&endpoint).unwrap();
        }
        None
    });
}

#[test]
fn a_network_that_gets_an_endpoint_at_the_last_moment_stays() {
    let other = NetworkSpec { kind: NetworkKind::Overlay { vni: 5000 }, ..spec() };
    let ipv6 = NetworkSpec { ipv6: Some("fd00:10:244::40/122".parse().unwrap()), ..bridge() };
    for (before, after) in [(spec(), other), (bridge(), ipv6)] {
        let (hns, host) = machine();
        let old = ensure(&*hns, &host, &before).unwrap().id;
        create_meanwhile(&hns, old);
        match ensure(&*hns, &host, &after) {
            Err(error) => {
                assert!(matches!(error, Error::NetworkDiffers { endpoints: 1, .. }), "{error}");
                assert_eq!(before, spec());
            }
            Ok(kept) => {
                assert_eq!(kept.id, old);
                let why = kept.without_ipv6.unwrap();
                assert!(why.contains("is used by 1 endpoints"), "{why}");
            }
        }
        assert_eq!(network(&*hns).id, old);
        assert_eq!(hns.networks().unwrap().len(), 1, "the second network goes again");
        let names: Vec<String> =
            hns.endpoints_of_network(old).unwrap().into_iter().map(|endpoint| endpoint.name).collect();
        let has_own = names.iter().any(|name| name == NODE_ENDPOINT);
        assert_eq!((names.len(), has_own), if before == spec() { (1, false) } else { (2, true) });
    }
}

#[test]
fn a_pod_that_comes_while_the_network_is_made_anew_gets_the_new_one() {
    let (hns, host) = machine();
    let old = ensure(&*hns, &host, &spec()).unwrap().id;
    let wiring = WindowsWiring::new(hns.clone()).with_network_lock(host.network_lock().clone());
    let pod = attachment(hns.create_namespace(&Default::default()).unwrap());
    let hold = hns.hold(makes_anchor);
    let replacing = {
        let (hns, host) = (hns.clone(), host.clone());
        let other = NetworkSpec { kind: NetworkKind::Overlay { vni: 5000 }, ..spec() };
        std::thread::spawn(move || ensure(&*hns, &host, &other).unwrap().id)
    };
    assert!(hold.has(1, Duration::from_secs(60)));
    hns.take();
    let connecting = std::thread::spawn(move || wiring.connect(&pod).map(drop));
    let creates = |call: &Call| matches!(call, Call::Create { kind: Kind::Endpoint, .. });
    let end = Instant::now() + Duration::from_millis(200);
    while Instant::now() < end {
        assert!(!hns.take().iter().any(creates), "the network is about to be deleted");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(hold);
    let new = replacing.join().unwrap();
    connecting.join().unwrap().unwrap();
    assert_ne!(new, old);
    assert_eq!(hns.endpoints_of_network(new).unwrap().len(), 1);
}

/// HNS would choose an adapter.
#[test]
fn no_network_is_made_or_replaced_while_nothing_tells_its_adapter() {
    let (hns, host) = machine();
    let without_address = |spec: &NetworkSpec| ensure_network_on(&*hns, spec, &[], (&host, None));
    let refused = |result: Result<PodNetwork, Error>| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Adapter { .. }) && error.is_passing(), "{error}");
        assert!(error.to_string().contains("address, which tells the adapter, is not known yet"), "{error}");
    };
    refused(without_address(&spec()));
    assert_eq!(hns.networks().unwrap(), []);
    let made = ensure(&*hns, &host, &spec()).unwrap();
    assert_eq!(without_address(&spec()).unwrap().id, made.id, "the existing one is used");
    refused(without_address(&NetworkSpec { kind: NetworkKind::Overlay { vni: 5000 }, ..spec() }));
    assert_eq!(network(&*hns).id, made.id);
}
