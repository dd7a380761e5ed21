//! What azure-npm for Windows sends, in its order, with each answer checked: sets and sets of sets of the network, ACLs that name them,
//! changes of sets, and the removal of ACLs by Update (Azure/azure-container-networking, `npm/pkg/dataplane`: `ipsets/ipsetmanager_windows.go`,
//! `policies/policymanager_windows.go`, `policies/policy_windows.go`, `dataplane_windows.go`). The client below is a model of that.

use std::net::Ipv4Addr;

use serde_json::{Map, Value, json};
use tortie_hcn::{Call, Guid, HResult, Hcn, Kind, Version};
use tortie_hns_emulator::{
    Config, Emulator, Packet, PacketDirection, SetReading, SeveralSets, UpdateReplaces, Verdict,
};

use crate::documents::support::{create, modify};

const NODE: Ipv4Addr = Ipv4Addr::new(10, 240, 0, 4);
/// The pods of the tests: on this node, and elsewhere.
const WEB: &str = "10.240.0.10";
const CLIENT: &str = "10.240.0.20";
const STRANGER: &str = "10.240.0.30";
const VERSIONS: [Version; 2] = [Config::SERVER_2022, Config::NEWEST];
/// The identifiers of its sets are hashes of their names.
const EMPTY: &str = "azure-npm-3922407721";
const NS_X: &str = "azure-npm-2854407721";
const NS_Y: &str = "azure-npm-2871185340";
const APP_WEB: &str = "azure-npm-1385180724";
const APP_CLIENT: &str = "azure-npm-2837910840";
const ALL_NAMESPACES: &str = "azure-npm-530439631";
const NS_TEAM: &str = "azure-npm-2682470511";
/// It removes ACLs by reading and sending back: the members that its type knows, and of these only those with a value, except for two.
const ACL_MEMBERS: [(&str, bool); 10] = [
    ("Id", false),
    ("Protocols", false),
    ("Action", true),
    ("Direction", true),
    ("LocalAddresses", false),
    ("RemoteAddresses", false),
    ("LocalPorts", false),
    ("RemotePorts", false),
    ("RuleType", false),
    ("Priority", false),
];

fn set(id: &str, name: &str, values: &str) -> Value {
    typed_set(id, name, "IPSET", values)
}

fn nested(id: &str, name: &str, values: &str) -> Value {
    typed_set(id, name, "NESTEDIPSET", values)
}

fn typed_set(id: &str, name: &str, kind: &str, values: &str) -> Value {
    json!({"Type": "SetPolicy", "Settings": {"Id": id, "Name": name, "PolicyType": kind, "Values": values}})
}

fn acl(members: Value) -> Value {
    json!({"Type": "ACL", "Settings": members})
}

/// An ACL of a policy: Local is the source and Remote the destination, in both directions.
fn rule(policy: &str, direction: &str, sets: (&str, &str), ports: &str) -> Value {
    let mut members = json!({"Id": format!("azure-acl-{policy}"), "Action": "Allow", "Direction": direction, "RuleType": "Switch",
        "Priority": 222});
    let mut add = |name: &str, value: &str| {
        if !value.is_empty() {
            members[name] = json!(value);
        }
    };
    add("LocalAddresses", sets.0);
    add("RemoteAddresses", sets.1);
    add("Protocols", if ports.is_empty() { "" } else { "6" });
    add(if direction == "In" { "LocalPorts" } else { "RemotePorts" }, ports);
    acl(members)
}

fn drop_rule(policy: &str, direction: &str) -> Value {
    acl(
        json!({"Id": format!("azure-acl-{policy}"), "Action": "Block", "Direction": direction, "RuleType": "Switch", "Priority": 3000}),
    )
}

/// Every policy ends with it: the node may probe its pods.
fn probes(policy: &str) -> Value {
    acl(
        json!({"Id": format!("azure-acl-{policy}"), "Action": "Allow", "Direction": "In", "RemoteAddresses": NODE.to_string(),
        "RuleType": "Switch", "Priority": 201}),
    )
}

/// A policy that admits clients of all namespaces of a team to three ports, and lets nothing else in.
fn web_policy() -> Vec<Value> {
    vec![
        rule("x-web", "In", (&format!("{APP_CLIENT},{NS_TEAM}"), ""), "80,81,82"),
        drop_rule("x-web", "In"),
        probes("x-web"),
    ]
}

/// A policy for what leaves.
fn out_policy() -> Vec<Value> {
    vec![rule("x-out", "Out", ("", APP_CLIENT), "443"), drop_rule("x-out", "Out"), probes("x-out")]
}

/// What Azure's CNI plugin gives an endpoint: other policies, and ACLs that npm does not own.
fn policies_of_azure_cni() -> Vec<Value> {
    vec![
        json!({"Type": "OutBoundNAT", "Settings": {"Exceptions": ["10.240.0.0/16", "10.0.0.0/16"]}}),
        acl(
            json!({"Protocols": "6", "Action": "Block", "Direction": "Out", "RemoteAddresses": "168.63.129.16/32",
            "RemotePorts": "80", "Priority": 200, "RuleType": "Switch"}),
        ),
        acl(json!({"Action": "Allow", "Direction": "In", "Priority": 65500, "RuleType": "Switch"})),
        acl(json!({"Action": "Allow", "Direction": "Out", "Priority": 65500, "RuleType": "Switch"})),
    ]
}

struct Npm {
    hns: Emulator,
    network: Guid,
}

impl Npm {
    /// The network of Azure's plugin, on an HNS that takes sets as npm writes them.
    fn new(version: Version) -> Npm {
        Npm::on(Config {
            set_reading: SetReading::Flow,
            several_sets: SeveralSets::Intersection,
            host_default: None,
            ..Config::as_hns(version, NODE)
        })
    }

    fn on(config: Config) -> Npm {
        let hns = Emulator::new(config);
        let network = json!({"Name": "azure", "Type": "L2Bridge", "SchemaVersion": {"Major": 2, "Minor": 0},
            "Policies": [{"Type": "NetAdapterName", "Settings": {"NetworkAdapterName": "Ethernet"}}],
            "Ipams": [{"Type": "Static", "Subnets": [{"IpAddressPrefix": "10.240.0.0/16",
                "Routes": [{"NextHop": "10.240.0.1", "DestinationPrefix": "0.0.0.0/0"}]}]}]});
        let network = create(&hns, Kind::Network, Guid::ZERO, &network).unwrap();
        Npm { hns, network }
    }

    fn endpoint(&self, address: &str, policies: &[Value]) -> Guid {
        let document = json!({"Name": address, "HostComputeNetwork": self.network, "IpConfigurations": [{"IpAddress": address,
            "PrefixLength": 16}], "Policies": policies, "SchemaVersion": {"Major": 2, "Minor": 0}});
        create(&self.hns, Kind::Endpoint, self.network, &document).unwrap()
    }

    fn read(&self, kind: Kind, id: Guid) -> Result<Value, HResult> {
        let answer = self.hns.call(&Call::Query { kind, id, query: String::new() });
        answer.map(|text| serde_json::from_str(&text).unwrap()).map_err(|failure| failure.code)
    }

    fn policies(&self, kind: Kind, id: Guid) -> Vec<Value> {
        self.read(kind, id).unwrap()["Policies"].as_array().cloned().unwrap_or_default()
    }

    /// The network's sets, without its other policies.
    fn sets(&self) -> Vec<Value> {
        let policies = self.policies(Kind::Network, self.network);
        policies.into_iter().filter(|policy| policy["Type"] == "SetPolicy").collect()
    }

    /// One request for each type, as `modifySetPolicies` orders them.
    fn change_sets(&self, request: &str, sets: &[Value]) -> Result<(), HResult> {
        let mut kinds = ["IPSET", "NESTEDIPSET"];
        if request == "Remove" {
            kinds.reverse();
        }
        for kind in kinds {
            let of_kind: Vec<&Value> =
                sets.iter().filter(|set| set["Settings"]["PolicyType"] == kind).collect();
            if !of_kind.is_empty() {
                self.send(Kind::Network, self.network, request, json!(of_kind))?;
            }
        }
        Ok(())
    }

    fn send(&self, kind: Kind, id: Guid, request: &str, policies: Value) -> Result<(), HResult> {
        let document =
            json!({"ResourceType": "Policy", "RequestType": request, "Settings": {"Policies": policies}});
        modify(&self.hns, kind, id, &document)
    }

    /// It looks the endpoint up, and adds the ACLs of a policy.
    fn add_policy(&self, endpoint: Guid, acls: &[Value]) -> Result<(), HResult> {
        self.read(Kind::Endpoint, endpoint)?;
        self.send(Kind::Endpoint, endpoint, "Add", json!(acls))
    }

    /// It reads the endpoint, and sends back the policies that stay: ACLs last, in the members that it knows.
    fn remove_acls(&self, endpoint: Guid, goes: impl Fn(&str) -> bool) -> Result<(), HResult> {
        let policies = self.read(Kind::Endpoint, endpoint)?["Policies"].take();
        let policies = policies.as_array().cloned().unwrap_or_default();
        let (acls, mut rest): (Vec<Value>, Vec<Value>) =
            policies.into_iter().partition(|policy| policy["Type"] == "ACL");
        let stays = |policy: &Value| !goes(policy["Settings"]["Id"].as_str().unwrap_or_default());
        rest.extend(acls.into_iter().filter(stays).map(|policy| acl(marshalled(&policy["Settings"]))));
        self.send(Kind::Endpoint, endpoint, "Update", json!(rest))
    }

    fn remove_policy(&self, endpoint: Guid, policy: &str) -> Result<(), HResult> {
        self.remove_acls(endpoint, |id| id == format!("azure-acl-{policy}"))
    }

    /// Its first act: the ACLs of an earlier process go, then its sets.
    fn boot(&self, endpoints: &[Guid]) -> Result<(), HResult> {
        for endpoint in endpoints {
            self.remove_acls(*endpoint, |id| id.starts_with("azure-acl"))?;
        }
        let ours = |set: &Value| set["Settings"]["Id"].as_str().unwrap_or_default().starts_with("azure-npm-");
        let sets: Vec<Value> = self.sets().into_iter().filter(ours).collect();
        self.change_sets("Remove", &sets)
    }

    /// The endpoints in a state.
    fn in_state(&self, state: u16) -> Vec<Guid> {
        let query = json!({"SchemaVersion": {"Major": 2, "Minor": 0}, "Flags": 0, "Filter": json!({"State": state}).to_string()});
        let answer =
            self.hns.call(&Call::Enumerate { kind: Kind::Endpoint, query: query.to_string() }).unwrap();
        serde_json::from_str(&answer).unwrap()
    }

    fn passes(&self, endpoint: Guid, direction: PacketDirection, peer: &str, port: u16) -> bool {
        let (local_port, remote_port) = match direction {
            PacketDirection::In => (port, 40_000),
            PacketDirection::Out => (40_000, port),
        };
        let (local, remote) = (WEB.parse().unwrap(), peer.parse().unwrap());
        let packet = Packet { direction, protocol: 6, local, remote, local_port, remote_port };
        self.hns.judge(endpoint, &packet).unwrap() == Verdict::Allow
    }

    fn lets_in(&self, endpoint: Guid, peer: &str, port: u16) -> bool {
        self.passes(endpoint, PacketDirection::In, peer, port)
    }

    fn lets_out(&self, endpoint: Guid, peer: &str, port: u16) -> bool {
        self.passes(endpoint, PacketDirection::Out, peer, port)
    }
}

/// What Go writes of an ACL that it has read.
fn marshalled(settings: &Value) -> Value {
    let mut written = Map::new();
    for (name, always) in ACL_MEMBERS {
        let value = settings.get(name).cloned();
        let is_zero = value.as_ref().is_none_or(|value| *value == json!("") || *value == json!(0));
        if always || !is_zero {
            written.insert(name.to_owned(), value.unwrap_or(json!("")));
        }
    }
    Value::Object(written)
}

/// The sets once pods of two namespaces are known; `x` has the server, `y` the client.
fn first_sets() -> Vec<Value> {
    vec![
        set(EMPTY, "emptyhashset-emptyhashset", ""),
        set(NS_X, "ns-x", WEB),
        set(NS_Y, "ns-y", CLIENT),
        set(APP_WEB, "podlabel-app:web", WEB),
        set(APP_CLIENT, "podlabel-app:client", CLIENT),
        nested(ALL_NAMESPACES, "nslabel-all-namespaces", &format!("{EMPTY},{NS_X},{NS_Y}")),
        nested(NS_TEAM, "nslabel-team:blue", &format!("{EMPTY},{NS_Y}")),
    ]
}

#[test]
fn sets_come_and_go_as_azure_npm_orders_them() {
    for version in VERSIONS {
        let npm = Npm::new(version);
        let others = npm.policies(Kind::Network, npm.network);
        assert_eq!(npm.boot(&[]), Ok(()), "nothing to remove");
        assert_eq!(npm.change_sets("Add", &first_sets()), Ok(()), "{version}");
        assert_eq!(npm.sets(), first_sets());
        assert_eq!(npm.change_sets("Add", &first_sets()[..1]), Err(HResult::HCN_E_POLICY_ALREADY_EXISTS));

        // Another pod of y: Update of all that changes, the lists after the sets.
        let more = [
            set(NS_Y, "ns-y", "10.240.0.20,10.240.0.21"),
            set(APP_CLIENT, "podlabel-app:client", "10.240.0.20,10.240.0.21"),
            nested(NS_TEAM, "nslabel-team:blue", &format!("{EMPTY},{NS_Y},{NS_X}")),
        ];
        assert_eq!(npm.change_sets("Update", &more), Ok(()));
        let now = npm.sets();
        assert!(more.iter().all(|set| now.contains(set)) && now.len() == 7, "{now:#?}");
        let unknown = [set("azure-npm-1", "podlabel-b", "")];
        assert_eq!(npm.change_sets("Update", &unknown), Err(HResult::HCN_E_POLICY_NOT_FOUND));
        let dangling = [nested(NS_TEAM, "nslabel-team:blue", "azure-npm-1")];
        assert_eq!(npm.change_sets("Update", &dangling), Err(HResult::HCN_E_INVALID_POLICY));
        assert_eq!(npm.sets(), now);

        // The last pod goes, and its sets are collected: those that are read, lists first.
        let empty = [set(NS_X, "ns-x", ""), set(APP_WEB, "podlabel-app:web", "")];
        assert_eq!(npm.change_sets("Update", &empty), Ok(()));
        assert_eq!(
            npm.change_sets("Remove", &[set(NS_X, "ns-x", "")]),
            Err(HResult::HCN_E_ENTITY_HAS_REFERENCES)
        );
        assert_eq!(npm.change_sets("Remove", &[set(APP_WEB, "podlabel-app:web", "")]), Ok(()));
        assert_eq!(npm.change_sets("Remove", &npm.sets()), Ok(()));
        assert_eq!((npm.sets(), npm.policies(Kind::Network, npm.network)), (vec![], others));
    }
}

/// The policy is in force with its ACLs, follows the sets, and goes by Update. What is not npm's stays.
#[test]
fn policies_of_azure_npm_are_in_force_until_an_update_removes_them() {
    for version in VERSIONS {
        let npm = Npm::new(version);
        npm.change_sets("Add", &first_sets()).unwrap();
        let endpoint = npm.endpoint(WEB, &policies_of_azure_cni());
        assert!(npm.lets_in(endpoint, STRANGER, 80) && npm.lets_out(endpoint, STRANGER, 80));
        assert!(!npm.lets_out(endpoint, "168.63.129.16", 80));

        npm.add_policy(endpoint, &web_policy()).unwrap();
        npm.add_policy(endpoint, &out_policy()).unwrap();
        let all = [policies_of_azure_cni(), web_policy(), out_policy()].concat();
        assert_eq!(npm.policies(Kind::Endpoint, endpoint), all, "as they were sent");
        for (peer, port, passes) in [
            (CLIENT, 80, true),
            (CLIENT, 82, true),
            (CLIENT, 83, false),
            (STRANGER, 80, false),
            (WEB, 80, false),
        ] {
            assert_eq!(npm.lets_in(endpoint, peer, port), passes, "{version}: from {peer} to {port}");
        }
        assert!(npm.lets_in(endpoint, &NODE.to_string(), 9999), "the node probes");
        assert!(npm.lets_out(endpoint, CLIENT, 443) && !npm.lets_out(endpoint, CLIENT, 80));
        assert!(!npm.lets_out(endpoint, STRANGER, 443) && !npm.lets_out(endpoint, "168.63.129.16", 80));

        // A client of another namespace that is not in the team, and then is: no ACL is written.
        let stranger = set(APP_CLIENT, "podlabel-app:client", &format!("{CLIENT},{STRANGER}"));
        npm.change_sets("Update", &[stranger]).unwrap();
        assert!(!npm.lets_in(endpoint, STRANGER, 80), "both sets are needed");
        npm.change_sets("Update", &[set(NS_X, "ns-x", &format!("{WEB},{STRANGER}"))]).unwrap();
        let team = nested(NS_TEAM, "nslabel-team:blue", &format!("{EMPTY},{NS_Y},{NS_X}"));
        npm.change_sets("Update", &[team]).unwrap();
        assert!(npm.lets_in(endpoint, STRANGER, 80) && !npm.lets_in(endpoint, WEB, 80));
        let only_sets = npm.policies(Kind::Endpoint, endpoint);
        assert_eq!(only_sets, all, "ACLs are as before");

        // A set that an ACL names stays.
        let named =
            npm.sets().into_iter().filter(|set| set["Settings"]["Id"] == APP_CLIENT).collect::<Vec<_>>();
        assert_eq!(npm.change_sets("Remove", &named), Err(HResult::HCN_E_ENTITY_HAS_REFERENCES));
        npm.remove_policy(endpoint, "x-web").unwrap();
        let rest = [policies_of_azure_cni(), out_policy()].concat();
        assert_eq!(npm.policies(Kind::Endpoint, endpoint), rest);
        assert!(npm.lets_in(endpoint, WEB, 83) && !npm.lets_out(endpoint, CLIENT, 80));
        // Removing it again sends the rest again.
        npm.remove_policy(endpoint, "x-web").unwrap();
        assert_eq!(npm.policies(Kind::Endpoint, endpoint), rest);
        npm.remove_policy(endpoint, "x-out").unwrap();
        assert_eq!(npm.policies(Kind::Endpoint, endpoint), policies_of_azure_cni());
        assert_eq!(npm.change_sets("Remove", &npm.sets()), Ok(()), "nothing names them any more");
    }
}

/// A changed policy is removed and added; one with more than 30 ACLs is a request of its own.
#[test]
fn a_changed_policy_is_replaced_and_large_ones_are_sent_alone() {
    let npm = Npm::new(Config::SERVER_2022);
    npm.change_sets("Add", &first_sets()).unwrap();
    let endpoint = npm.endpoint(WEB, &policies_of_azure_cni());
    let ports = |range: std::ops::Range<u16>| -> Vec<Value> {
        range
            .map(|port| rule("x-many", "In", (APP_CLIENT, ""), &port.to_string()))
            .chain([probes("x-many")])
            .collect()
    };
    npm.add_policy(endpoint, &[ports(1000..1040), web_policy()].concat()).unwrap();
    assert!(npm.lets_in(endpoint, CLIENT, 1039) && !npm.lets_in(endpoint, CLIENT, 1040));
    npm.remove_policy(endpoint, "x-many").unwrap();
    npm.add_policy(endpoint, &ports(1040..1045)).unwrap();
    assert!(!npm.lets_in(endpoint, CLIENT, 1039) && npm.lets_in(endpoint, CLIENT, 1040));
    assert_eq!(
        npm.policies(Kind::Endpoint, endpoint).len(),
        policies_of_azure_cni().len() + web_policy().len() + 6
    );
    // An addition that HNS refuses changes nothing: an ACL that is there, or a set that is not.
    let before = npm.policies(Kind::Endpoint, endpoint);
    let twice = [rule("x-new", "In", (APP_CLIENT, ""), "9"), rule("x-many", "In", (APP_CLIENT, ""), "1040")];
    assert_eq!(npm.add_policy(endpoint, &twice), Err(HResult::HCN_E_POLICY_ALREADY_EXISTS));
    let unknown = [rule("x-new", "In", ("azure-npm-1", ""), "9")];
    assert_eq!(npm.add_policy(endpoint, &unknown), Err(HResult::HCN_E_INVALID_POLICY));
    assert_eq!(npm.policies(Kind::Endpoint, endpoint), before);
}

/// Its lite form writes addresses: Remote is the peer in both directions.
#[test]
fn addresses_in_place_of_sets_mean_the_peer() {
    let npm = Npm::new(Config::SERVER_2022);
    let endpoint = npm.endpoint(WEB, &policies_of_azure_cni());
    let from = |direction: &str, nets: &str| {
        acl(
            json!({"Id": "azure-acl-x-lite", "Action": "Allow", "Direction": direction, "RemoteAddresses": nets, "RuleType": "Switch",
            "Priority": 222}),
        )
    };
    let acls = [
        from("In", "10.240.0.20/32,10.9.0.0/16"),
        from("Out", "10.8.0.0/16"),
        drop_rule("x-lite", "In"),
        drop_rule("x-lite", "Out"),
        probes("x-lite"),
    ];
    npm.add_policy(endpoint, &acls).unwrap();
    for peer in [CLIENT, "10.9.1.2"] {
        assert!(npm.lets_in(endpoint, peer, 80) && !npm.lets_out(endpoint, peer, 80), "{peer}");
    }
    assert!(npm.lets_out(endpoint, "10.8.1.2", 80) && !npm.lets_in(endpoint, "10.8.1.2", 80));
}

/// npm starts again beside what it has left: sets in use stay until the ACLs are gone.
#[test]
fn a_restart_removes_acls_before_sets() {
    for version in VERSIONS {
        let npm = Npm::new(version);
        npm.change_sets("Add", &first_sets()).unwrap();
        let foreign = typed_set("tortie-1", "foreign", "IPSET", "10.1.0.1");
        npm.send(Kind::Network, npm.network, "Add", json!([foreign])).unwrap();
        let endpoint = npm.endpoint(WEB, &policies_of_azure_cni());
        npm.add_policy(endpoint, &web_policy()).unwrap();
        assert_eq!(npm.change_sets("Remove", &first_sets()), Err(HResult::HCN_E_ENTITY_HAS_REFERENCES));
        assert_eq!(npm.boot(&[endpoint]), Ok(()));
        assert_eq!(
            (npm.sets(), npm.policies(Kind::Endpoint, endpoint)),
            (vec![foreign], policies_of_azure_cni())
        );
    }
}

/// It asks for endpoints in two states, and ignores those that have gone since.
#[test]
fn endpoints_are_found_by_their_state_and_a_missing_one_has_its_code() {
    let npm = Npm::new(Config::SERVER_2022);
    let (endpoint, other) = (npm.endpoint(WEB, &[]), npm.endpoint(CLIENT, &[]));
    assert_eq!((npm.in_state(2), npm.in_state(3)), (vec![], vec![]));
    let namespace = create(&npm.hns, Kind::Namespace, Guid::ZERO, &json!({"Type": "HostDefault"})).unwrap();
    let attach =
        json!({"ResourceType": "Endpoint", "RequestType": "Add", "Settings": {"EndpointId": endpoint}});
    modify(&npm.hns, Kind::Namespace, namespace, &attach).unwrap();
    assert_eq!((npm.in_state(2), npm.in_state(3)), (vec![], vec![endpoint]));
    npm.hns.call(&Call::Delete { kind: Kind::Endpoint, id: other }).unwrap();
    assert_eq!(npm.add_policy(other, &web_policy()), Err(HResult::HCN_E_ENDPOINT_NOT_FOUND));
    assert_eq!(npm.remove_policy(other, "x-web"), Err(HResult::HCN_E_ENDPOINT_NOT_FOUND));
    // Another pod gets the address, and begins without the policy.
    let again = npm.endpoint(CLIENT, &[]);
    assert!(npm.policies(Kind::Endpoint, again).is_empty());
}

/// On Calico's network it first adds ACLs of its own, two of which have no RuleType.
#[test]
fn base_acls_for_calicos_network_are_kept_by_every_removal_but_a_reset() {
    let base = [
        acl(
            json!({"Id": "azure-acl-baseazurewireserver", "Protocols": "6", "Action": "Block", "Direction": "Out",
            "RemoteAddresses": "168.63.129.16/32", "RemotePorts": "80", "RuleType": "Switch", "Priority": 200}),
        ),
        acl(
            json!({"Id": "azure-acl-baseallowinswitch", "Action": "Allow", "Direction": "In", "Priority": 65499}),
        ),
        acl(
            json!({"Id": "azure-acl-baseallowoutswitch", "Action": "Allow", "Direction": "Out", "Priority": 65499}),
        ),
        acl(
            json!({"Id": "azure-acl-baseallowinhost", "Action": "Allow", "Direction": "In", "RuleType": "Host"}),
        ),
        acl(
            json!({"Id": "azure-acl-baseallowouthost", "Action": "Allow", "Direction": "Out", "RuleType": "Host"}),
        ),
    ];
    let npm = Npm::new(Config::SERVER_2022);
    npm.change_sets("Add", &first_sets()).unwrap();
    let endpoint = npm.endpoint(WEB, &[]);
    npm.add_policy(endpoint, &base).unwrap();
    // A restarted npm tries again, and only logs the refusal.
    assert_eq!(npm.add_policy(endpoint, &base), Err(HResult::HCN_E_POLICY_ALREADY_EXISTS));
    npm.add_policy(endpoint, &web_policy()).unwrap();
    assert!(npm.lets_in(endpoint, CLIENT, 80) && !npm.lets_in(endpoint, STRANGER, 80));
    npm.remove_policy(endpoint, "x-web").unwrap();
    assert_eq!(npm.policies(Kind::Endpoint, endpoint), base);
    assert!(npm.lets_in(endpoint, STRANGER, 80));
    npm.boot(&[endpoint]).unwrap();
    assert!(npm.policies(Kind::Endpoint, endpoint).is_empty());
}

/// Nothing but ACLs of npm: the request that removes them has none. Where Update replaces only what it names, they stay.
#[test]
fn the_last_acls_go_by_a_request_without_acls() {
    let nat = json!({"Type": "OutBoundNAT", "Settings": {"Exceptions": ["10.240.0.0/16"]}});
    for (update_replaces, go) in [
        (UpdateReplaces::AclsAndSameType, true),
        (UpdateReplaces::All, true),
        (UpdateReplaces::SameType, false),
    ] {
        for others in [vec![], vec![nat.clone()]] {
            let npm = Npm::on(Config { update_replaces, ..Config::as_hns(Config::NEWEST, NODE) });
            npm.change_sets("Add", &first_sets()).unwrap();
            let endpoint = npm.endpoint(WEB, &others);
            npm.add_policy(endpoint, &web_policy()).unwrap();
            npm.remove_policy(endpoint, "x-web").unwrap();
            let left = npm.policies(Kind::Endpoint, endpoint);
            assert_eq!(
                left.len(),
                others.len() + if go { 0 } else { web_policy().len() },
                "{update_replaces:?}"
            );
            assert_eq!(npm.lets_in(endpoint, STRANGER, 80), go, "{update_replaces:?}");
        }
    }
}
