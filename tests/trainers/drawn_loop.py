"""A training script drawn from a seed, sound or with one planted fault: what it trains, how it updates, how it saves.

It needs no torch unless the seed draws `torch.save`, and starts in a tenth of a second.
`benchmarks/proof_statistics.py` kills two hundred of them, and two hundred with a fault.
"""

import argparse
import json
import os
import random
import shutil
import time

import numpy as np

FORMS = ("safetensors", "safetensors", "npz", "json", "folder", "torch")
OPTIMIZERS = ("momentum", "adam", "rmsprop", "adagrad")
SCHEDULES = ("constant", "exponential", "warm-up", "cosine")


def drawn(seed):
    "Everything about a script but its fault."
    draw = random.Random(f"drawn loop {seed}")
    batch = draw.choice((2, 3, 4))
    return {"width": draw.randint(2, 6), "hidden": draw.choice((0, 0, 3, 5)), "batch": batch,
            "rows": batch * draw.randint(4, 6), "optimizer": draw.choice(OPTIMIZERS),
            "schedule": draw.choice(SCHEDULES), "noise": draw.choice(("gradient", "inputs", "dropout")),
            "ema": draw.random() < 0.5,
            "form": draw.choice(FORMS), "series": draw.random() < 0.4, "steps": draw.randint(6, 9),
            "every": draw.choice((1, 1, 2)), "micro": draw.choice((1, 2)), "dtype": draw.choice(("f4", "f4", "f8"))}


def faults_of(seed):
    "What can go wrong with a script, each with an effect on what it leaves."
    about = drawn(seed)
    optional = [("average lost", about["ema"]), ("schedule off by one", about["schedule"] != "constant")]
    return ["moments lost", "generator lost", "position lost", "batch repeated", "batch skipped", "rate changed",
            "step off by one", "one bit flipped", "counter lost", "second batch skipped", "starts over", "weights lost",
            *(name for name, possible in optional if possible)]


def rate_at(schedule, step):
    "The learning rate of a step, counted from 0."
    return 0.05 * {"constant": 1.0, "exponential": 0.9**step, "warm-up": (step + 1) / 12,
                   "cosine": 0.5 + 0.5 * np.cos(np.pi * step / 12)}[schedule]


def gradients(weights, inputs, targets):
    "The gradient of a mean squared error, of one linear layer or of two with a tanh between."
    if len(weights) == 1:
        return [inputs.T @ (inputs @ weights[0] - targets) / len(inputs)]
    inside = np.tanh(inputs @ weights[0])
    error = (inside @ weights[1] - targets) / len(inputs)
    return [inputs.T @ ((error @ weights[1].T) * (1 - inside**2)), inside.T @ error]


def updated(optimizer, weight, moments, gradient, rate, step):
    "One weight and its two moments after an update."
    first, second = moments
    if optimizer == "momentum":
        first = 0.9 * first + gradient
        return weight - rate * first, [first, second]
    if optimizer == "adagrad":
        second = second + gradient**2
        return weight - rate * gradient / (np.sqrt(second) + 1e-8), [first, second]
    second = 0.99 * second + 0.01 * gradient**2
    if optimizer == "rmsprop":
        return weight - rate * 0.1 * gradient / (np.sqrt(second) + 1e-8), [first, second]
    first = 0.9 * first + 0.1 * gradient
    unbiased = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.99 ** (step + 1))
    return weight - rate * 0.1 * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8), [first, second]


def beside(path, prefix):
    "A name beside a checkpoint's that no reader takes for one."
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{prefix}.{name}")


def save(form, path, arrays, notes):
    "Write a checkpoint beside its name, and move it there."
    temporary, text = beside(path, "tmp"), {name: json.dumps(value) for name, value in notes.items()}
    if form == "safetensors":
        from safetensors.numpy import save_file

        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary, text)
    elif form == "torch":
        import torch

        torch.save({**{name: torch.from_numpy(array) for name, array in arrays.items()}, **notes}, temporary)
    elif form == "json":
        with open(temporary, "w") as file:
            json.dump({**{name: array.tolist() for name, array in arrays.items()}, **notes}, file)
    elif form == "npz":
        with open(temporary, "wb") as file:
            np.savez(file, **arrays, **{f"notes.{name}": value for name, value in text.items()})
    else:
        os.makedirs(temporary)
        with open(os.path.join(temporary, "notes.json"), "w") as file:
            json.dump(notes, file)
        with open(os.path.join(temporary, "arrays.npz"), "wb") as file:
            np.savez(file, **arrays)
        if os.path.isdir(path):  # a folder is not replaced by a rename
            os.rename(path, beside(path, "old"))
    os.replace(temporary, path)
    shutil.rmtree(beside(path, "old"), ignore_errors=True)


def tidied(folder):
    "Clear away what a kill left of a save; a checkpoint that was moved away and not replaced is moved back."
    for name in os.listdir(folder):
        prefix, _, rest = name.partition(".")
        full = os.path.join(folder, name)
        if prefix == "old" and not os.path.exists(os.path.join(folder, rest)):
            os.rename(full, os.path.join(folder, rest))
        elif prefix in ("old", "tmp"):
            shutil.rmtree(full) if os.path.isdir(full) else os.remove(full)


def load(form, path):
    "Read a checkpoint: arrays and notes."
    if form == "safetensors":
        from safetensors import safe_open
        from safetensors.numpy import load_file

        with safe_open(path, "np") as file:
            return load_file(path), {name: json.loads(value) for name, value in file.metadata().items()}
    if form == "torch":
        import torch

        found = torch.load(path, weights_only=True)
        arrays = {name: value.numpy() for name, value in found.items() if isinstance(value, torch.Tensor)}
        return arrays, {name: value for name, value in found.items() if name not in arrays}
    if form == "json":
        with open(path) as file:
            found = json.load(file)
        return ({name: np.array(value) for name, value in found.items() if isinstance(value, list)},
                {name: value for name, value in found.items() if not isinstance(value, list)})
    with np.load(os.path.join(path, "arrays.npz") if form == "folder" else path) as file:
        arrays = {name: file[name] for name in file.files if not name.startswith("notes.")}
        notes = {name[6:]: json.loads(str(file[name])) for name in file.files if name.startswith("notes.")}
    if form == "folder":
        with open(os.path.join(path, "notes.json")) as file:
            notes = json.load(file)
    return arrays, notes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", default="")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    args = parser.parse_args()
    about, fault = drawn(args.seed), args.fault
    os.makedirs(args.out, exist_ok=True)
    tidied(args.out)
    dtype, fixed = np.dtype(about["dtype"]), np.random.default_rng([args.seed, 1])
    data = fixed.normal(size=(about["rows"], about["width"])).astype(dtype)
    targets = data.sum(1, keepdims=True) + 1
    shapes = [(about["width"], about["hidden"]), (about["hidden"], 1)] if about["hidden"] else [(about["width"], 1)]
    weights = [fixed.normal(size=shape).astype(dtype) for shape in shapes]
    moments = [[np.zeros_like(weight), np.zeros_like(weight)] for weight in weights]
    average = [weight.copy() for weight in weights]
    noise, step, taken, counter, resumed_at = np.random.default_rng([args.seed, 2]), 0, 0, 0, -1

    def name_of(number):
        suffix = {"safetensors": ".safetensors", "npz": ".npz", "json": ".json", "folder": "", "torch": ".pt"}
        middle = f"ckpt-{number}" if about["series"] else "ckpt"
        return os.path.join(args.out, middle + suffix[about["form"]])

    found = [number for number in range(about["steps"], 0, -1) if os.path.exists(name_of(number))]
    if found and fault != "starts over":
        arrays, notes = load(about["form"], name_of(found[0]))
        step, taken, resumed_at = notes["step"], notes["taken"], notes["step"]
        for i in range(len(weights)):
            shape = weights[i].shape
            if fault != "weights lost":
                weights[i] = arrays[f"model.{i}"].astype(dtype).reshape(shape)
            if fault != "moments lost":
                moments[i] = [arrays[f"optimizer.{i}.{j}"].astype(dtype).reshape(shape) for j in range(2)]
            if about["ema"] and fault != "average lost":
                average[i] = arrays[f"ema.{i}"].astype(dtype).reshape(shape)
        if fault != "generator lost":
            noise.bit_generator.state = json.loads(notes["rng"])
        taken = {"position lost": 0, "batch repeated": taken - about["batch"],
                 "batch skipped": taken + about["batch"]}.get(fault, taken)
        step += fault == "step off by one"
        if fault == "one bit flipped":
            largest = np.unravel_index(np.abs(weights[0]).argmax(), weights[0].shape)
            weights[0].view(f"u{dtype.itemsize}")[largest] ^= 1
        if fault != "counter lost":
            counter = notes["counter"]

    while step < about["steps"]:
        if fault == "second batch skipped" and step == resumed_at + 1:
            taken += about["batch"]
        total = [np.zeros_like(weight) for weight in weights]
        for _ in range(about["micro"]):
            order = np.random.default_rng([args.seed, 3, taken // about["rows"]]).permutation(about["rows"])
            rows = order[taken % about["rows"]:][:about["batch"]]
            inputs, taken = data[rows], taken + about["batch"]
            if about["noise"] == "inputs":
                inputs = inputs + 0.1 * noise.normal(size=inputs.shape).astype(dtype)
            if about["noise"] == "dropout":
                inputs = inputs * (noise.random(inputs.shape) < 0.8).astype(dtype) / dtype.type(0.8)
            total = [a + b for a, b in zip(total, gradients(weights, inputs, targets[rows]), strict=True)]
        if about["noise"] == "gradient":
            total = [gradient + 0.1 * noise.normal(size=gradient.shape).astype(dtype) for gradient in total]
        counter += 1
        rate = rate_at(about["schedule"], step + (fault == "schedule off by one" and resumed_at >= 0))
        rate *= (1.01 if fault == "rate changed" and resumed_at >= 0 else 1.0) / (1 + 0.01 * counter)
        for i, gradient in enumerate(total):
            weight, moments[i] = updated(about["optimizer"], weights[i], moments[i], gradient, rate, step)
            weights[i] = weight.astype(dtype)
            moments[i] = [moment.astype(dtype) for moment in moments[i]]
            average[i] = (0.9 * average[i] + 0.1 * weights[i]).astype(dtype)
        step += 1
        time.sleep(args.pause)
        if step % about["every"] == 0 or step == about["steps"]:
            arrays = {f"model.{i}": weight for i, weight in enumerate(weights)}
            arrays |= {f"optimizer.{i}.{j}": moments[i][j] for i in range(len(weights)) for j in range(2)}
            arrays |= {f"ema.{i}": average[i] for i in range(len(weights))} if about["ema"] else {}
            notes = {"step": step, "taken": taken, "counter": counter, "lr": float(rate),
                     "rng": json.dumps(noise.bit_generator.state)}
            save(about["form"], name_of(step), arrays, notes)


if __name__ == "__main__":
    main()
