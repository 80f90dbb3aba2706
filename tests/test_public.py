"""The list of public names: what is exported is a promise, and this is where it is read."""

import ast
import importlib
from pathlib import Path

import pytest

from colossax import cli

NAMES = {
    "colossax": (
        "Plan attention boost build_step constrain fit fit_offload linear next_token_loss plan "
        "preset use"
    ),
    "colossax.config": (
        "AttentionConfig BatchConfig Bound BoundPlan ExpertRates ExpertsConfig Float8 FrozenDict "
        "GREEDY_OR_MORE "
        "GROUP_AXES HOST_KINDS LOGICAL_DIMS LossConfig LossScale MESH_AXES MeshAxis OffloadConfig "
        "PIPELINED_OPTION PRESETS PipelineConfig Placement Plan Precision RING_AXES Rules "
        "SAVEABLE SEQUENCE_AXES SHARES STATE_KINDS Segment above at_least bind bound_of "
        "cache_folder check_text check_types from_json misspelt nearest preset to_json user_path "
        "within"
    ),
    "colossax.pipeline": (
        "Costs FORMS Kind Op Report SCHEDULES Table checked movable plot_schedule schedule simulate"
    ),
    "colossax.scheduling": (
        "Emitted Ended EngineRequest Heard KEEPS Keep Piece Reads SamplingConfig Scheduler Seen "
        "Stats StepPlan TOP_SHARE check_length check_tokens"
    ),
    "colossax.pallas.attention": (
        "AttentionSpec Branches Heavy Kept Mask Operands Pages PairDropout RelativeBias "
        "Retrieved Scoring attend attend_block attend_cache attend_retrieved attention "
        "backward_block block_gradients block_implementation block_ranges declined_by dense "
        "forward_block keys_and_values mean_keys merge_blocks row_delta row_ranges variants "
        "why_no_ranges with_ranges with_sinks"
    ),
    "colossax.pallas.norms": "layer_norm rms_norm",
    "colossax.pallas.grouped_matmul": "GroupedSpec declined_by grouped_matmul variants",
    "colossax.pallas.int4_matmul": "GROUP Int4Spec choose declined_by int4_matmul variants",
    "colossax.pallas.paged_attention": (
        "Attended Mass PagedSpec Seen choose declined_by paged_attention spec_of variants"
    ),
    "colossax.pallas.sparse_matmul": (
        "FOUR SparseSpec choose declined_by expanded sparse_matmul variants"
    ),
    "colossax.sharding": (
        "CACHE_DIMS Dense Layout MEAN_DIMS NATURAL RowOrder Weight activation_axes "
        "activation_sharding apart attend_cache attend_retrieved attention balanced_order "
        "batch_axes cache_spec check_parameter compiler_options compute_dtype constrain current "
        "current_order explain explain_html gather_for_others gather_weight gathered_axes "
        "heads_axes host_sharding in_order keeping kept_share left_whole linear linears lookup "
        "moe param_sharding recomputing reduction_dtype remembered replicated resolve "
        "rows_as_here ruled_dims seq_axes shared_rows transfer use validate whole_rows "
        "with_ranges without_shards"
    ),
    "colossax.sharding.experts": (
        "Base Capacity CosineRouter DenseToSparse ExpertChoice ExpertWeights GShard Gate GateInput "
        "Hash Hierarchical KTop1 Layout LinearRouter LocalExperts Router Routing TopK balance_loss "
        "balanced_placement layout_of load moe moved_bias row_keys scales_of"
    ),
    "colossax.sharding.sequence": (
        "DOUBLE_RING_OPTIONS Order RingAxes RingMasks Settings balanced_from_contiguous_local "
        "contiguous_from_balanced_local gather_attention_local gathered_masks_local inverse_order "
        "positions_local ring_attention_local ring_masks_local ring_self_attention_local "
        "ulysses_local zigzag_order"
    ),
    "colossax.offload": (
        "DEVICE_SHARE Demand GB Kind PipelinedTest Rates Residency Setting Traffic Update "
        "UpdateRate Way build_stack cpu_device cpu_share device_budget device_memory fetch "
        "gb_down gb_up held_bytes hiding_tokens host_budget host_shares kept_token_share "
        "load_rates measure_rates new_stack on_host place rates_path resolved_segments save_rates "
        "segment_counts stage_segments store to_device update_seconds waited_bytes "
        "working_set_bytes"
    ),
    "colossax.layerwise": (
        "Chain CutLoss CutRun Layer LayerRun LayerState Link Marking Maximum Residual "
        "Scanned StackCall StackRunner Stacks StageLayers Stream Transposed added alternates "
        "checkpointed current_runner cut_loss cut_marked kept_sharding nothing over_stages "
        "recording_kept running shapes_of stack_call stage_layers standing_in summed"
    ),
    "colossax.data": (
        "BatchLoader Chat ChatTemplate Corpus Documents MaskedRows Mixture RowSource Rows Split "
        "SpanRows SyntheticRows Tokenizer ValidationBatches WholeDocuments "
        "cache_folder encode_corpus global_arrays "
        "joined path_documents stack_rows stdlib_documents train_tokenizer unigram_entropy_nats "
        "Tones log_mel wanted_rows"
    ),
    "colossax.checkpoint": (
        "ArraySlot Checkpointer LayerSource RecordReader RecordWriter find_checkpoint slot_of"
    ),
    "colossax.offload.disk": "RING RecordLayout RecordStore disk_bytes",
    "colossax.optim": (
        "ByModel Groups adafactor adamw adamw_8bit applied averaged came check_groups "
        "constant decay_mask decays ema galore inverse_sqrt is_layerwise lamb lars layerwise "
        "linear lion map_moments multistep muon one_cycle polynomial rounding_key "
        "schedule_free sgd steps_of stochastic_round transformation warmup_cosine wsd"
    ),
    "colossax.aot": (
        "Buffer Collective Gpu Island KernelReport Link MemoryReport Module Place Program Target "
        "Totals Traffic Transfer TransferTotals assert_collectives checkpoint_stacks collectives "
        "compile_program device_bytes exchanging exposed_collectives exposed_transfers "
        "full_rematerialisations full_stack_copies gpu_keys hops host_arguments host_arithmetic "
        "host_bytes host_compute host_copies kernel_reports kernels_anew memory_report "
        "parse_module parse_target sync_transfers_in_loops target_devices totals traffic "
        "transfer_totals transfers unexpected_collectives"
    ),
    "colossax.nn": (
        "EncoderDecoder EncoderDecoderConfig RelativeConfig "
        "DecoderSizes DynamicScaling EncoderSizes LinearScaling LongScaling every ACTIVATIONS "
        "DropoutConfig HeadConfig TransformConfig DualEncoder DualEncoderConfig EncoderPart "
        "ProjectorConfig SeeingConfig SeeingDecoder "
        "Attention AttentionShape Block CacheArray CacheSpec Decoder DecoderConfig Embedding "
        "Experts FamilyConfig FlatTokens LanguageModel LayerNorm LayerStack LayerState "
        "LatentAttention LatentConfig LatentShape Layers Linear Llama3Scaling MLP MixtureConfig "
        "ModelSpec Models QueryGrowth RMSNorm RopeConfig Side StackOutput Sublayer VocabParts "
        "Weighted Wiring YarnScaling alibi_slopes cross_entropy decoder_layer describe "
        "AdapterConfig Drafter DrafterConfig TargetPages as_target block_mask drafter_maker "
        "target_pages FramesConfig PatchConfig even_head_dim expert_layer initialise "
        "kl_divergence named param pure renamed rope_tables rotate run_recurrence weight_of "
        "has_adapter token_logps window_slots with_adapter "
        "with_gathers with_new_head with_weights without_adapter"
    ),
    "colossax.models": (
        "CohereConfig FalconConfig GLM4Config GLMConfig GPTJConfig GPTNeoXConfig Gemma2Config "
        "Gemma3Config OLMo2Config Phi3Config SmolLM3Config StarCoder2Config add_family "
        "BARTConfig BERTConfig ModernBERTConfig RoBERTaConfig T5Config ViTConfig DINOv2Config "
        "CLIPConfig LlavaConfig Qwen2VLConfig SigLIPConfig WhisperConfig "
        "BloomConfig DeepSeekV2Config DeepSeekV3Config FAMILIES Family GPT2Config GPTOSSConfig "
        "Llama4Config LlamaConfig MistralConfig MixtralConfig ModelParams OLMoEConfig OPTConfig "
        "Qwen2Config Qwen2MoEConfig Qwen3Config Qwen3MoEConfig config_from_json config_to_json "
        "family_of maker merged most_used params_of_checkpoint params_of_tree pruned upcycled "
        "with_layers write_checkpoint CHAT_DOCUMENT"
    ),
    "colossax.planner": (
        "Edge Facts Fitted HIDING_FORMULA HostTraffic Inspection LayoutCost ProgramsCost Settled "
        "StageFacts boost build_step check_pipelined compare compare_layouts fit_offload "
        "inspect_run inspect_task largest_microbatch settle settle_for_target "
        "settle_task_for_target"
    ),
    "colossax.step": "Step StepOptions any_order whole_batch",
    "colossax.tasks": (
        "Callback DataConfig MaskConfig OptimizerConfig RolloutConfig RunLength SampleConfig TAKEN "
        "SpanConfig Task TrainConfig "
        "classification_loss contrastive_loss masked_token_loss preference_loss "
        "image_text_loss value_loss distillation_loss distillation_options next_token_loss task_of "
        "initial_adapter initial_model train_config_from_json ObjectiveConfig dpo_loss ipo_loss "
        "kto_loss kto_options orpo_loss reference_options simpo_loss PolicyConfig "
        "Answer RewardWorkers Rewarded clipped_value_loss gae "
        "group_advantages kl_estimate policy_loss policy_options whitened "
        "actor_critic_loss critic_options soft_target_loss soft_target_options started_from"
    ),
    "colossax.run": (
        "AverageEvaluation BestCheckpoint Callback EarlyStopping Outcome ResumableBatches "
        "RunConfig RunFolder RunOptions StepEnd Stream fit train"
    ),
    "colossax.processes": (
        "EXIT_CODES Gate Group Launch StopAgreement StopSignals find_launch heeded join start_jax"
    ),
    "colossax.inference": (
        "Embedded Embedder EmbedderStats LoadedDrafter StoredDrafter open_drafter "
        "CacheLayout Call Chunk Constraint Continuation DecodeProgram Engine EngineStats Fitted "
        "Flight Generation Generator InOrder LoadedModel Replicas Request Sampling Scheduler "
        "Several StagedProgram StoredModel Tick fit_layers inference_plan load check_length "
        "check_tokens make_engine open_checkpoint several together unrolled Outliers find_outliers "
        "SharesNoStepError StoredBeside beside Drafter NgramDrafter ModelDrafter GlideDrafter "
        "RetrievalDrafter holds_drafter"
    ),
    "colossax.evaluation": (
        "AnswerItem Asked Benchmark ChoiceItem Evaluated EvaluationConfig Examination Examiner "
        "Item PassageItem Prompt Rated Ratio Reader Result Score aligned read_benchmark table "
        "written"
    ),
    "colossax.serve": (
        "Backend Constraint EngineDown EngineFailed EngineFull Facts Grammars Keys Limits "
        "ServeOptions Started Stats Telling bound serve"
    ),
    "colossax.recipes": (
        "DEFAULT_RECIPE OwnTask RECIPES any_recipe described recipe recipe_from_file"
    ),
}


NOT_EXPORTED = {"require_supported_jax", "before_jax", "lazily", "TYPE_CHECKING"}
"""What makes a package lazy, or keeps what JAX does at bay."""


def exported(module):
    """Names an `__init__` re-exports or defines, rooms and private names aside."""
    room = importlib.import_module(module)
    return sorted(
        name
        for name in dir(room)
        if not name.startswith("_")
        and name not in NOT_EXPORTED
        and not _is_module(value := getattr(room, name))
        and _is_ours(value)
    )


def _is_module(value):
    return type(value).__name__ == "module"


def _is_ours(value):
    return getattr(value, "__module__", "colossax").startswith("colossax")


@pytest.mark.parametrize("module", NAMES)
def test_public_names(module):
    assert exported(module) == sorted(NAMES[module].split())


FILES_FOR_THE_COMMAND_LINE = {
    "colossax.models.adapters.peft",
    "colossax.models.hf",
    "colossax.pallas.bench",
    "colossax.pipeline.measured",
    "colossax.planner.auto",
    "colossax.planner.counting.inspection_plot",
    "colossax.planner.telling.plan_plot",
    "colossax.planner.deciding.calibrating",
    "colossax.planner.deciding.measuring",
    "colossax.serve.measuring",
}
"""Loaded where they are needed: what reads other libraries' files, measures, or draws."""


def test_the_command_line_imports_public_names_only():
    folder = Path(cli.__file__).parent
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("colossax."):
                parts = node.module.split(".")
                lies = folder.parent.joinpath(*parts[1:])
                assert (
                    parts[1] == "cli"
                    or len(parts) == 2  # a room, or a file that is one
                    or (lies / "__init__.py").is_file()
                    or node.module in FILES_FOR_THE_COMMAND_LINE
                ), f"{file.name} imports {node.module}"
