"""As diffusers' train_unconditional.py is written: a U-Net learns to take noise away, its average samples and is saved.

python diffusers_unconditional.py --train_data images.npy --output_dir OUT
"""

import argparse
import os

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from checkflow.integrations.accelerate import attach
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_data", default="images.npy")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--resolution", type=int, default=16)
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--num_epochs", type=int, default=6)
    parser.add_argument("--save_model_epochs", type=int, default=1)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--lr_warmup_steps", type=int, default=5)
    parser.add_argument("--ema_inv_gamma", type=float, default=1.0)
    parser.add_argument("--ema_power", type=float, default=3 / 4)
    parser.add_argument("--ema_max_decay", type=float, default=0.9999)
    parser.add_argument("--ddpm_num_steps", type=int, default=1000)
    parser.add_argument("--ddpm_num_inference_steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Images(torch.utils.data.Dataset):
    """Flipped at random, as they are loaded."""

    def __init__(self, path):
        self.images = np.load(path)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index]).permute(2, 0, 1).float() / 127.5 - 1.0
        return {"input": image.flip(-1) if torch.rand(()) < 0.5 else image}


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    os.makedirs(args.output_dir, exist_ok=True)

    model = UNet2DModel(
        sample_size=args.resolution,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        attention_head_dim=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    ema_model = EMAModel(
        model.parameters(),
        decay=args.ema_max_decay,
        use_ema_warmup=True,
        inv_gamma=args.ema_inv_gamma,
        power=args.ema_power,
        model_cls=UNet2DModel,
        model_config=model.config,
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=args.ddpm_num_steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.95, 0.999), weight_decay=1e-6)
    train_dataloader = torch.utils.data.DataLoader(
        Images(args.train_data), batch_size=args.train_batch_size, shuffle=True
    )
    lr_scheduler = get_scheduler(
        "cosine",
        optimizer=optimizer,
        num_warmup_steps=args.lr_warmup_steps * args.gradient_accumulation_steps,
        num_training_steps=len(train_dataloader) * args.num_epochs,
    )
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    ema_model.to(accelerator.device)

    kept = {"loader": train_dataloader, "scheduler": lr_scheduler, "extra": {"ema": ema_model}}
    ckpt = attach(accelerator, model, optimizer, store="checkpoints", **kept)
    global_step, first_epoch = ckpt.restore(), train_dataloader.iteration
    for epoch in range(first_epoch, args.num_epochs):
        model.train()
        for batch in train_dataloader:
            clean_images = batch["input"]
            noise = torch.randn(clean_images.shape, dtype=clean_images.dtype, device=clean_images.device)
            timesteps = torch.randint(
                0, noise_scheduler.config.num_train_timesteps, (clean_images.shape[0],), device=clean_images.device
            ).long()
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)

            with accelerator.accumulate(model):
                model_output = model(noisy_images, timesteps).sample
                loss = F.mse_loss(model_output.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            if accelerator.sync_gradients:
                ema_model.step(model.parameters())
                global_step += 1
                print(f"step {global_step}: loss {loss.detach().item():.4f}, ema decay {ema_model.cur_decay_value:.4f}")
                ckpt.step()

        accelerator.wait_for_everyone()
        if epoch % args.save_model_epochs == 0 or epoch == args.num_epochs - 1:
            unet = accelerator.unwrap_model(model)
            ema_model.store(unet.parameters())
            ema_model.copy_to(unet.parameters())
            pipeline = DDPMPipeline(unet=unet, scheduler=noise_scheduler)
            pipeline.set_progress_bar_config(disable=True)
            generator = torch.Generator(device=pipeline.device).manual_seed(0)
            images = pipeline(
                generator=generator, batch_size=2, num_inference_steps=args.ddpm_num_inference_steps, output_type="np"
            ).images
            np.save(os.path.join(args.output_dir, f"samples-{epoch}.npy"), images)
            pipeline.save_pretrained(args.output_dir)
            ema_model.restore(unet.parameters())

    accelerator.end_training()
    return model, optimizer, lr_scheduler, ema_model, global_step


if __name__ == "__main__":
    model, optimizer, lr_scheduler, ema_model, global_step = main()
