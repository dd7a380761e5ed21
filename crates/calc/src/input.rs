//! Parses objects of the cluster; the code behind this module does not see JSON.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::Value;
use tortie_api::calico::{
    BgpConfigurationSpec, EndpointToHostAction, FelixConfigurationSpec, HostEndpointSpec, IpPool,
    TierDefault, WorkloadEndpointSpec,
};
use tortie_api::ipam::Block;
use tortie_api::kubernetes::{EndpointSlice, Node, Service};
use tortie_api::net::Action;
use tortie_api::{FieldError, Key, Kind, Network, Resource, in_words};
use tortie_policy::program::{EndOfTier, PolicyRules, Rule};
use tortie_policy::{Compiled, OwnLabels, compile, compile_profile, compile_read, policy_id, readable_order};

use crate::claims::PodOfBlock;
use crate::policies::{Body, TierSettings};

/// The parsed content of an object.
pub(crate) enum Input {
    Policy(Box<Compiled>),
    Tier(TierSettings),
    /// The labels for its endpoints, and its rules.
    Profile(OwnLabels, Body),
    /// The labels of a namespace or service account.
    Labels(OwnLabels),
    NetworkSet(OwnLabels, Box<[IpNet]>),
    Slice(EndpointSlice),
    Service(Box<Service>),
    /// The last part tells whether only an annotation of the pod names the addresses.
    Endpoint(OwnLabels, Box<WorkloadEndpointSpec>, bool),
    Host(OwnLabels, Box<HostEndpointSpec>),
    Node(Node),
    Pool(IpPool),
    Felix(Box<FelixConfigurationSpec>),
    Bgp(Box<BgpConfigurationSpec>),
    /// The node of a block, and the pods that have its addresses.
    Block(IpNet, BlockNodes, Vec<PodOfBlock>),
}

/// The content of the object, if it exists and has relevant content; and the problem with it, if any.
pub(crate) fn read(key: &Key, value: Option<&Value>) -> (Option<Input>, Option<String>) {
    let Some(value) = value else { return (None, None) };
    match key.kind {
        Kind::IpamBlock => read_block(key, value),
        Kind::Tier | Kind::Profile => match Resource::read(key, value) {
            Ok(resource) => (typed(key, resource), None),
            Err(problems) => {
                let (input, problem) = closed(key, value, &problems);
                (Some(input), Some(problem))
            }
        },
        Kind::FelixConfiguration => {
            let (resource, problems) = Resource::read_what_can_be(key, value);
            let is_read = resource.is_some();
            let input = resource.and_then(|resource| typed(key, resource)).unwrap_or_else(|| {
                Input::Felix(Box::new(FelixConfigurationSpec {
                    default_endpoint_to_host_action: Some(EndpointToHostAction::Drop),
                    ..FelixConfigurationSpec::default()
                }))
            });
            let instead = match is_read {
                true => {
                    "what cannot be read is left out; without a readable defaultEndpointToHostAction, packets from pods to their own node are dropped"
                }
                false => {
                    "packets from pods to their own node are dropped, and all else is as if it were absent"
                }
            };
            let problem = (!problems.is_empty()).then(|| format!("{}; {instead}", in_words(&problems)));
            (Some(input), problem)
        }
        _ if policy_id(key).is_some() => {
            (compile(key, value).map(|policy| Input::Policy(Box::new(policy))), None)
        }
        _ => {
            let (resource, problems) = Resource::read_what_can_be(key, value);
            let instead = match &resource {
                Some(_) => "what cannot be read is left out",
                None => "it is treated as if it were not there",
            };
            let problem = (!problems.is_empty()).then(|| format!("{}; {instead}", in_words(&problems)));
            (resource.and_then(|resource| typed(key, resource)), problem)
        }
    }
}

/// The content of a parsed object; nothing if it does not have its key's kind.
pub(crate) fn typed(key: &Key, resource: Resource) -> Option<Input> {
    Some(match (key.kind, resource) {
        (Kind::Namespace, Resource::Namespace(namespace)) => Input::Labels(namespace.metadata.labels.into()),
        (Kind::ServiceAccount, Resource::ServiceAccount(account)) => {
            Input::Labels(account.metadata.labels.into())
        }
        (Kind::Profile, Resource::Profile(profile)) => {
            let (rules, sets) = compile_profile(&profile);
            Input::Profile(profile.spec.labels_to_apply.into(), Body::new(Arc::new(rules), sets))
        }
        (Kind::Tier, Resource::Tier(tier)) => {
            let end = match tier.spec.default_action.unwrap_or_default() {
                TierDefault::Deny => EndOfTier::Deny,
                TierDefault::Pass => EndOfTier::Pass,
            };
            Input::Tier(TierSettings { order: tier.spec.order, end })
        }
        (Kind::NetworkSet, Resource::NetworkSet(set))
        | (Kind::GlobalNetworkSet, Resource::GlobalNetworkSet(set)) => {
            let mut nets: Vec<IpNet> = set.spec.nets.iter().map(|Network(net)| *net).collect();
            nets.sort_unstable();
            nets.dedup();
            Input::NetworkSet(set.metadata.labels.into(), nets.into())
        }
        (Kind::EndpointSlice, Resource::EndpointSlice(slice)) => Input::Slice(slice),
        (Kind::Service, Resource::Service(service)) => Input::Service(Box::new(service)),
        (Kind::WorkloadEndpoint, Resource::WorkloadEndpoint(endpoint)) => {
            let unreported = endpoint.is_unreported();
            Input::Endpoint(endpoint.metadata.labels.into(), Box::new(endpoint.spec), unreported)
        }
        (Kind::HostEndpoint, Resource::HostEndpoint(host)) => {
            Input::Host(host.metadata.labels.into(), Box::new(host.spec))
        }
        (Kind::Node, Resource::Node(node)) => Input::Node(node),
        (Kind::IpPool, Resource::IpPool(pool)) => Input::Pool(pool),
        (Kind::FelixConfiguration, Resource::FelixConfiguration(felix)) => Input::Felix(Box::new(felix.spec)),
        (Kind::BgpConfiguration, Resource::BgpConfiguration(bgp)) => Input::Bgp(Box::new(bgp.spec)),
        (_, policy) => Input::Policy(Box::new(compile_read(key, &policy)?)),
    })
}

/// The closed form of a tier or profile that cannot be understood.
fn closed(key: &Key, value: &Value, problems: &[FieldError]) -> (Input, String) {
    let problem = in_words(problems);
    if key.kind == Kind::Tier {
        let tier = TierSettings { order: readable_order(&value["spec"]), end: EndOfTier::Deny };
        let consequence =
            "the tier comes where it stands, or first if that cannot be read, and ends with Deny";
        return (Input::Tier(tier), format!("{problem}; {consequence}"));
    }
    let deny = vec![Rule::all(Action::Deny)];
    let rules = PolicyRules { ingress: deny.clone(), egress: deny };
    let body = Body::new(Arc::new(rules), BTreeMap::new());
    (
        Input::Profile(OwnLabels::default(), body),
        format!("{problem}; it denies everything and gives no labels"),
    )
}

fn read_block(key: &Key, value: &Value) -> (Option<Input>, Option<String>) {
    let Ok(cidr) = key.name.parse::<IpNet>() else {
        return (None, Some("its name is no network; it has no route".to_owned()));
    };
    // The kernel has one route for this block and for the one with the same network, whatever they are called.
    let network = cidr.trunc().to_string();
    if key.name != network {
        return (
            None,
            Some(format!("it is another object for the network {network}, and has no route; delete it")),
        );
    }
    match Block::deserialize(value) {
        Ok(block) if block.deleted => (None, None),
        Ok(block) => (Some(Input::Block(cidr, BlockNodes::of(&block), pods_of(&block))), None),
        Err(error) => (None, Some(format!("{error}; it has no route"))),
    }
}

/// The pods that have addresses of a block.
fn pods_of(block: &Block) -> Vec<PodOfBlock> {
    let pods = block.allocated().map(|(address, attribute)| {
        let owner = |name| attribute.owner.as_ref()?.get(name).cloned();
        let [node, namespace, pod] = ["node", "namespace", "pod"].map(|name| owner(name).unwrap_or_default());
        PodOfBlock { address, node, namespace, pod }
    });
    pods.collect()
}

/// The nodes of a block's addresses.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct BlockNodes {
    /// The owner, if there is one.
    pub(crate) owner: Option<String>,
    /// The addresses that other nodes have borrowed, and those nodes.
    pub(crate) borrowed: BTreeMap<IpAddr, String>,
}

impl BlockNodes {
    fn of(block: &Block) -> Self {
        let owner = block.node().map(str::to_owned);
        let borrowed = block.allocated().filter_map(|(address, attribute)| {
            let node = attribute.owner.as_ref()?.get("node")?;
            (owner.as_ref() != Some(node)).then(|| (address, node.clone()))
        });
        let borrowed = borrowed.collect();
        Self { owner, borrowed }
    }
}
