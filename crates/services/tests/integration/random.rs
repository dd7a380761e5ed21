//! Histories of events. After each one, the incremental result is that of a computation from scratch, each change changes something, and
//! packets go where the oracle allows.
#![allow(clippy::print_stdout)]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use proptest::prelude::*;
use serde_json::Value;
use testkit::random::Random;
use tortie_api::Key;
use tortie_api::net::{IpVersion, Protocol};
use tortie_oracle::{
    SERVICE_RULES, ServiceClient, ServiceCluster, ServiceOutcome, ServicePacket, Visit, judge_service,
    service_health,
};
use tortie_services::{
    Affinities, Backend, FrontendKey, KINDS, Masquerading, NodePortAddresses, NodeServices, Outcome, Packet,
    Sender, ServiceName, Services,
};

use testkit::services::{Event, NODE, Sent, Settings, event, packet, settings};

const CASES: u32 = 150;
const EVENTS: usize = 24;
/// The packets after each event.
const PACKETS: usize = 10;
/// The fewest judgements by each rule.
const FEWEST: usize = 40;
/// The health checks of a Service without ready endpoints here, and with some.
const HEALTH: [&str; 2] = ["unhealthy", "healthy"];

type Objects = BTreeMap<Key, Value>;
type Step = (Event, Vec<Sent>);

#[test]
fn packets_go_where_the_oracle_allows_after_each_event() {
    let step = (event(), prop::collection::vec(packet(), PACKETS));
    let strategy = (settings(), prop::collection::vec(step, EVENTS));
    let seen: RefCell<BTreeMap<&str, usize>> = RefCell::default();
    let test = |(settings, steps): (Settings, Vec<Step>)| {
        History::new(&settings).run(&steps, &mut seen.borrow_mut()).map_err(TestCaseError::fail)
    };
    let lacking = || {
        let seen = seen.borrow();
        let count = |rule: &str| seen.get(rule).copied().unwrap_or_default();
        let rule = SERVICE_RULES.iter().chain(&HEALTH).find(|rule| count(rule) < FEWEST)?;
        Some(format!("{rule}: {} judgements, {FEWEST} at least", count(rule)))
    };
    let result = Random::cases(CASES).shrinking(300).prove(&strategy, test, lacking);
    for (rule, count) in seen.borrow().iter() {
        println!("{rule:28} {count:>8}");
    }
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// A node through a history.
struct History<'a> {
    settings: &'a Settings,
    objects: Objects,
    services: Services,
    /// The state by deltas alone.
    copy: NodeServices,
    affinities: Affinities,
    visits: Vec<Visit>,
    now: u64,
}

impl<'a> History<'a> {
    fn new(settings: &'a Settings) -> Self {
        Self {
            settings,
            objects: Objects::new(),
            services: new_services(settings),
            copy: NodeServices::default(),
            affinities: Affinities::default(),
            visits: Vec::new(),
            now: 1_000,
        }
    }

    fn run(mut self, steps: &[Step], seen: &mut BTreeMap<&'static str, usize>) -> Result<(), String> {
        for (index, (event, packets)) in steps.iter().enumerate() {
            match &event.value {
                Some(value) => drop(self.objects.insert(event.key.clone(), value.clone())),
                None => drop(self.objects.remove(&event.key)),
            }
            self.services.update(&event.key, event.value.as_ref());
            // Some events come together.
            if index % 3 == 1 {
                continue;
            }
            self.flush()?;
            self.check_health(seen)?;
            let frontends: Vec<FrontendKey> = self.copy.frontends.keys().copied().collect();
            for sent in packets {
                self.now += sent.delay;
                self.judge(&sent.aimed(&frontends), seen)?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), String> {
        for delta in self.services.flush().expect("all is listed") {
            let before = self.copy.clone();
            self.copy.apply(&delta);
            if self.copy == before {
                return Err(format!("{delta:?} changes nothing"));
            }
            let dangling = self
                .copy
                .frontends
                .values()
                .find(|frontend| !self.copy.ports.contains_key(&frontend.service_port));
            if let Some(frontend) = dangling {
                return Err(format!("after {delta:?}, {frontend:?} leads nowhere"));
            }
        }
        let scratch = from_scratch(self.settings, &self.objects);
        if *self.services.state() != self.copy || self.copy != *scratch.state() {
            return Err(format!("{:#?}\nby changes, from scratch:\n{:#?}", self.copy, scratch.state()));
        }
        let (known, new) = (self.services.problems(), scratch.problems());
        if known != new {
            return Err(format!("the problems {known:?}, from scratch {new:?}"));
        }
        Ok(())
    }

    /// The health checks are those of the oracle.
    fn check_health(&self, seen: &mut BTreeMap<&'static str, usize>) -> Result<(), String> {
        let objects: Vec<Value> = self.objects.values().cloned().collect();
        let cluster = self.cluster(&objects);
        for service in objects.iter().filter(|object| object["kind"] == "Service") {
            for (family, name) in [(IpVersion::V4, "IPv4"), (IpVersion::V6, "IPv6")] {
                let expected = service_health(&cluster, service, name);
                let text = |field: &str| service["metadata"][field].as_str().unwrap().to_owned();
                let key = (ServiceName { namespace: text("namespace"), name: text("name") }, family);
                let check = self.copy.health_checks.get(&key);
                if check.map(|check| (check.port, check.local_endpoints)) != expected {
                    return Err(format!("{key:?}: the check {check:?}, the oracle says {expected:?}"));
                }
                match expected {
                    Some((_, 0)) => *seen.entry(HEALTH[0]).or_default() += 1,
                    Some(_) => *seen.entry(HEALTH[1]).or_default() += 1,
                    None => {}
                }
            }
        }
        Ok(())
    }

    fn cluster<'o>(&'o self, objects: &'o [Value]) -> ServiceCluster<'o> {
        ServiceCluster {
            node: NODE,
            objects,
            node_port_addresses: self.settings.node_port_addresses.as_deref(),
            masquerade_all: self.settings.masquerade_all,
            knows_pods: self.settings.knows_pods,
        }
    }

    fn judge(
        &mut self,
        packet: &ServicePacket,
        seen: &mut BTreeMap<&'static str, usize>,
    ) -> Result<(), String> {
        let objects: Vec<Value> = self.objects.values().cloned().collect();
        let cluster = self.cluster(&objects);
        let judged = judge_service(&cluster, packet, &self.visits, self.now);
        for rule in &judged.rules {
            *seen.entry(rule).or_default() += 1;
        }
        let asked = asked(packet);
        let frontend = self.copy.frontend(&asked);
        let port = frontend.map(|frontend| frontend.service_port.clone());
        let timeout = port.as_ref().and_then(|port| self.copy.ports[port].affinity);
        let remembered = match (&port, timeout) {
            (Some(port), Some(timeout)) => self.affinities.of(port, packet.source, timeout, self.now),
            _ => BTreeSet::new(),
        };
        let masquerading =
            Masquerading { all: self.settings.masquerade_all, knows_pods: self.settings.knows_pods };
        let outcome = self.copy.evaluate(&asked, masquerading, &remembered);
        if in_words(&outcome) != judged.outcome {
            return Err(format!("{packet:?} at {}: {outcome:?}, the oracle says {judged:?}", self.now));
        }
        if let (Outcome::Translated(all), Some(port), Some(service_port)) =
            (outcome, port, judged.service_port)
        {
            // Any of them may be chosen.
            let backend = all.iter().nth(self.now as usize % all.len()).unwrap().backend;
            self.affinities.connected(&port, packet.source, backend.socket(), self.now);
            let backend = (backend.address, backend.port);
            self.visits.retain(|visit| {
                (visit.client, &visit.service_port, visit.backend) != (packet.source, &service_port, backend)
            });
            self.visits.push(Visit { client: packet.source, service_port, backend, at: self.now });
        }
        Ok(())
    }
}

fn asked(packet: &ServicePacket) -> Packet {
    Packet {
        source: packet.source,
        sender: match packet.sender {
            ServiceClient::Pod => Sender::Pod,
            ServiceClient::Node => Sender::Node,
            ServiceClient::Other => Sender::Other,
        },
        destination: packet.destination,
        is_to_node: packet.is_to_node,
        protocol: Protocol::from_name(packet.protocol).unwrap(),
        port: packet.port,
    }
}

fn in_words(outcome: &Outcome) -> ServiceOutcome {
    match outcome {
        Outcome::Untouched => ServiceOutcome::Untouched,
        Outcome::Dropped => ServiceOutcome::Dropped,
        Outcome::Rejected => ServiceOutcome::Rejected,
        Outcome::Translated(all) => {
            let words = |Backend { address, port, is_local: _ }, masquerade| (address, port, masquerade);
            let all = all.iter().map(|translation| words(translation.backend, translation.masquerade));
            ServiceOutcome::Backends(all.collect::<BTreeSet<(IpAddr, u16, bool)>>())
        }
    }
}

fn new_services(settings: &Settings) -> Services {
    let addresses = settings.node_port_addresses.clone();
    let mut services =
        Services::new(NODE, addresses.map_or(NodePortAddresses::Primary, NodePortAddresses::In));
    for kind in KINDS {
        services.listed(kind);
    }
    services
}

/// The objects in another order than that of the history.
fn from_scratch(settings: &Settings, objects: &Objects) -> Services {
    let mut services = new_services(settings);
    for (key, value) in objects.iter().rev() {
        services.update(key, Some(value));
    }
    services.flush();
    services
}
