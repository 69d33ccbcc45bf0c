//! Ranks and learning rates by regular expressions (`network_reg_dims`, `network_reg_lrs` of sd-scripts, for FLUX.1). They
//! are searched in kohya's names of layers, which are not ours. So they are tried on every layer of the published model,
//! and the layers that they find get patterns that find these and no others, or only such that an earlier one found.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};
use tokenizers::utils::SysRegex;

use super::super::error::ImportError;
use super::super::mapping::Mapping;
use crate::model::adapter::name_matches;
use crate::model::diffusion::flux;

const RANKS: &str = "network_args.network_reg_dims";
const RATES: &str = "network_args.network_reg_lrs";

/// A regular expression with its number. Of several that find a layer the first counts.
type LayerRule = (SysRegex, f64);

/// A layer of a block: the list of blocks, the block's index, and its name there.
type BlockLayer<'a> = (&'a str, usize, &'a str);

/// Writes `adapter.pattern`, and layers of rank 0 as `adapter.exclude`. `targets` are the layers that are trained.
pub(super) fn write(mapping: &mut Mapping, targets: &[&str]) -> Result<(), ImportError> {
    let (ranks, rates) = (rules(mapping, RANKS)?, rules(mapping, RATES)?);
    let (Some(ranks), Some(rates)) = (ranks, rates) else { return Ok(()) };
    if ranks.is_empty() && rates.is_empty() {
        return Ok(());
    }
    let base = (flux::FAMILY.published_model().config)();
    let specs = base.tensor_specs().expect("a published model can be built");
    let matrices = specs.iter().filter(|spec| spec.shape.sizes().len() == 2);
    let names: Vec<&str> = matrices.filter_map(|spec| spec.name.strip_suffix(".weight")).collect();
    let all: BTreeSet<BlockLayer<'_>> = names.iter().filter_map(|name| in_block(name)).collect();
    let mut groups: BTreeMap<[Option<u64>; 2], BTreeSet<BlockLayer<'_>>> = BTreeMap::new();
    for name in names.iter().filter(|name| is_target(targets, name)) {
        let Some(layer) = in_block(name) else { continue };
        let original = base.original_module(name);
        let theirs = original.first().map(|piece| piece.key.replace('.', "_")).unwrap_or_default();
        let theirs = format!("lora_unet_{theirs}");
        let numbers = [&ranks, &rates].map(|rules| number(rules, &theirs).map(f64::to_bits));
        groups.entry(numbers).or_default().insert(layer);
    }
    let alpha = mapping.value("adapter.alpha").cloned();
    let mut groups: Vec<_> =
        groups.into_iter().map(|(numbers, layers)| (of_bits(numbers), layers)).collect();
    // Of several patterns the first counts: those of few layers come before others, which may find these too.
    groups.sort_by_key(|([rank, _], layers)| (*rank != Some(0.0), layers.len()));
    let (mut patterns, mut excluded, mut taken) = (Vec::new(), Vec::new(), BTreeSet::new());
    for ([rank, rate], layers) in groups {
        if rank == Some(0.0) {
            excluded.extend(named(&layers, &taken, &all));
        } else if rank.is_some() || rate.is_some() {
            let table = |name: String| pattern(name, rank, rate, alpha.as_ref());
            patterns.extend(named(&layers, &taken, &all).into_iter().map(table));
        } else {
            continue;
        }
        taken.extend(layers);
    }
    let keys = [RANKS, RATES].into_iter().filter(|key| mapping.config.peek(key).is_some());
    let keys = keys.collect::<Vec<_>>().join(", ");
    if patterns.is_empty() && excluded.is_empty() {
        mapping.no_effect(&keys, "they find none of the layers that are trained");
    }
    if !patterns.is_empty() {
        mapping.set("adapter.pattern", patterns, &keys);
    }
    if !excluded.is_empty() {
        mapping.set("adapter.exclude", excluded, RANKS);
    }
    Ok(())
}

fn is_target(targets: &[&str], name: &str) -> bool {
    let presets =
        flux::FAMILY.target_presets.iter().filter(|preset| targets.contains(&preset.name));
    let mut patterns = presets.flat_map(|preset| preset.patterns.iter().copied().flatten());
    patterns.any(|pattern| name_matches(pattern, name))
        || targets.iter().any(|pattern| name_matches(pattern, name))
}

/// Pairs of an expression and a number, with commas between them; none if one of them cannot be taken over.
fn rules(mapping: &mut Mapping, key: &str) -> Result<Option<Vec<LayerRule>>, ImportError> {
    let typed = mapping.config.text(key)?.unwrap_or_default();
    let mut rules = Vec::new();
    for pair in typed.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
        let number = pair.split_once('=').and_then(|(expression, number)| {
            Some((expression.trim(), number.trim().parse::<f64>().ok()?))
        });
        let Some((expression, number)) = number else {
            mapping.differs(key, format!("kohya passes over {pair}, which has no number"));
            continue;
        };
        let Ok(expression) = SysRegex::new(expression) else {
            let why = format!(
                "{expression} is no regular expression here: write adapter.pattern into the job"
            );
            mapping.refuse(key, why);
            return Ok(None);
        };
        rules.push((expression, number));
    }
    Ok(Some(rules))
}

fn number(rules: &[LayerRule], name: &str) -> Option<f64> {
    let found = rules.iter().find(|(expression, _)| expression.find_iter(name).next().is_some());
    found.map(|(_, number)| *number)
}

fn of_bits(numbers: [Option<u64>; 2]) -> [Option<f64>; 2] {
    numbers.map(|bits| bits.map(f64::from_bits))
}

/// A table of `adapter.pattern`; alpha stays what it is for all layers.
fn pattern(name: String, rank: Option<f64>, rate: Option<f64>, alpha: Option<&Value>) -> Value {
    let mut table = Map::from_iter([("match".to_owned(), Value::from(name))]);
    if let Some(rank) = rank {
        table.insert("rank".into(), json!(rank as u64));
        table.extend(alpha.map(|alpha| ("alpha".to_owned(), alpha.clone())));
    }
    table.extend(rate.map(|rate| ("learning_rate".to_owned(), json!(rate))));
    Value::Object(table)
}

fn in_block(name: &str) -> Option<BlockLayer<'_>> {
    let (list, rest) = name.split_once('.')?;
    let (index, inner) = rest.split_once('.')?;
    Some((list, index.parse().ok()?, inner))
}

/// Patterns for these layers of blocks, and for no others but those that are taken already: whole lists of blocks, layers of all blocks of a list, whole blocks,
/// and single layers.
fn named(
    layers: &BTreeSet<BlockLayer<'_>>,
    taken: &BTreeSet<BlockLayer<'_>>,
    all: &BTreeSet<BlockLayer<'_>>,
) -> Vec<String> {
    let (mut patterns, mut left) = (Vec::new(), layers.clone());
    let mut take = |pattern: String,
                    left: &mut BTreeSet<BlockLayer<'_>>,
                    like: &dyn Fn(&BlockLayer<'_>) -> bool| {
        let mut whole = all.iter().filter(|layer| like(layer));
        let is_theirs = whole.all(|layer| layers.contains(layer) || taken.contains(layer));
        if is_theirs && left.iter().any(like) {
            left.retain(|layer| !like(layer));
            patterns.push(pattern);
        }
    };
    for (list, _, inner) in layers {
        let of_list = |layer: &BlockLayer<'_>| layer.0 == *list;
        take(format!("{list}.*"), &mut left, &of_list);
        take(format!("{list}.*.{inner}"), &mut left, &|it| of_list(it) && it.2 == *inner);
    }
    for (list, index, _) in layers {
        take(format!("{list}.{index}.*"), &mut left, &|it| it.0 == *list && it.1 == *index);
    }
    patterns.extend(left.iter().map(|(list, index, inner)| format!("{list}.{index}.{inner}")));
    patterns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_have_the_fewest_names_that_are_theirs_alone() {
        let names = ["a.0.q", "a.0.k", "a.1.q", "a.1.k", "b.0.q", "b.0.k", "b.1.q"];
        let all: BTreeSet<_> = names.iter().filter_map(|name| in_block(name)).collect();
        let named_of = |some: &[usize]| {
            let some = some.iter().filter_map(|at| in_block(names[*at])).collect();
            named(&some, &in_block("b.0.k").into_iter().collect(), &all)
        };
        assert_eq!(named_of(&[0, 1, 2, 3]), ["a.*"]);
        assert_eq!(named_of(&[0, 2]), ["a.*.q"]);
        assert_eq!(named_of(&[2, 3]), ["a.1.*"]);
        assert_eq!(named_of(&[4, 6]), ["b.*"], "b.0.k is taken");
        assert_eq!(named_of(&[0, 3]), ["a.0.q", "a.1.k"]);
        assert!(named_of(&[]).is_empty());
    }
}
