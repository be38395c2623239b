//! Synthetic routing, and the bytes that a routing sends between nodes.

mod drift;
mod generate;

use aristos_formats::InputError;
use aristos_formats::routing::{NO_EXPERT, Record, Routing};

use crate::comms::Load;
pub use drift::{Drift, Drifting};
pub use generate::{Popularity, Workload};

/// Bytes sent for each token and each of its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Payload {
    /// Bytes of the routing weight.
    pub weight_bytes: u64,
    /// Bytes of each of two numbers: the token's source, and its index there.
    pub id_bytes: u64,
    /// Bytes of the expert number.
    pub routing_bytes: u64,
    /// Elements of the hidden state.
    pub embed_dim: u64,
    /// Bytes of an element of the hidden state.
    pub element_bytes: u64,
}

impl Default for Payload {
    /// The values of the routing-simulation document that `docs/simulator.md` names, without a hidden state.
    fn default() -> Payload {
        Payload { weight_bytes: 4, id_bytes: 2, routing_bytes: 1, embed_dim: 0, element_bytes: 2 }
    }
}

impl Payload {
    /// Total bytes.
    pub fn bytes(&self) -> u64 {
        self.weight_bytes + 2 * self.id_bytes + self.routing_bytes + self.embed_dim * self.element_bytes
    }
}

/// The bytes that nodes send each other in the dispatch of each record (layer and step). Experts are placed on the nodes in consecutive
/// blocks. As in the routing-simulation document, a token is sent to each of its experts separately. Tokens for experts of their own node
/// are not counted.
///
/// # Errors
/// Returns an error if the number of nodes does not divide that of the experts, or if the bytes overflow.
pub fn dispatch_load(routing: &Routing, payload: &Payload) -> Result<Load, InputError> {
    if !routing.experts.is_multiple_of(routing.nodes) {
        let expected = format!("a divisor of the {} experts, which are in blocks on them", routing.experts);
        return Err(InputError::value("nodes", format!("is {}", routing.nodes), expected));
    }
    Load::check_size(routing.nodes, routing.records.len())?;
    let (nodes, of_node) = (routing.nodes, routing.experts / routing.nodes);
    let layer = |record: &Record| {
        let mut bytes = vec![0u64; nodes * nodes];
        for (from, choices) in record.choices_by_node(routing.top_k) {
            for &expert in choices.iter().filter(|expert| **expert != NO_EXPERT) {
                let to = expert as usize / of_node;
                if to != from {
                    bytes[from * nodes + to] += payload.bytes();
                }
            }
        }
        bytes
    };
    Load::new(nodes, routing.records.iter().map(layer).collect()).checked()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = r#"{"version": 1, "experts": 4, "top_k": 2, "nodes": 2, "records": [
        {"layer": 3, "step": 7, "tokens_per_node": [2, 1], "choices": [0, 3, 2, 1, 0, -1]}]}"#;

    #[test]
    fn loads_by_hand() {
        let routing = Routing::from_json(SMALL).unwrap();
        // Experts 0 and 1 are on node 0. Node 0 sends a token to each of experts 3 and 2, and node 1 one to expert 0; each takes 9 bytes.
        let load = dispatch_load(&routing, &Payload::default()).unwrap();
        assert_eq!(load, Load::new(2, vec![vec![0, 18, 9, 0]]));
        let payload = Payload { embed_dim: 16, ..Payload::default() };
        assert_eq!(dispatch_load(&routing, &payload).unwrap().layers, [[0, 82, 41, 0]]);
    }

    #[test]
    fn bad_node_counts_are_reported_in_one_line() {
        let error = |experts, nodes| {
            let routing = Routing::new(experts, 2, nodes, Routing::from_json(SMALL).unwrap().records);
            dispatch_load(&routing, &Payload::default()).unwrap_err().to_string()
        };
        assert_eq!(error(2048, 2048), "nodes is 2048, expected at most 1024 in a load");
        assert!(error(4, 3).starts_with("nodes is 3"));
    }
}
